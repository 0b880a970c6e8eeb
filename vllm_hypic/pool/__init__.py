"""The public pool: records of segments in a worker's memory, as all requests read them."""
