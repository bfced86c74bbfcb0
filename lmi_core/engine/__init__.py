"""The engine: requests, scheduler, sequences, the step loop, and the delivery of events."""
