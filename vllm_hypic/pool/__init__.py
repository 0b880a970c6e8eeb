"""The public pool: records of segments in a worker's memory, which all requests read."""
