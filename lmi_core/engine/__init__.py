"""The engine: scheduler, sequences, the step loop and the runner that executes steps."""
