"""Records between a device that lags and the store: a stand-in for the device, and a world around it."""
