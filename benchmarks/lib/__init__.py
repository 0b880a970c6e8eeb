"""What benchmarks, demonstrations and tests share: models of random weights, processes, servers, clusters."""
