"""What runs inside the model: attention backend, rotary embeddings, linear layers and their ops."""
