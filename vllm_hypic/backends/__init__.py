"""Code that runs inside the model: attention backends, rotary embeddings, linear layers and operators."""
