"""What runs inside the model: attention backend, rotary taps, linear layers and their ops."""
