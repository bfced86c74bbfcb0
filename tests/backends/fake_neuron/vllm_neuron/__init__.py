"""The plugin that makes vLLM run on Neuron devices; vLLM finds it by its entry point."""
