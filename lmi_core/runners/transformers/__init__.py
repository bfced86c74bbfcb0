"""The runner of models that Transformers computes, in padded batches."""
