"""What benchmarks, demonstrations and tests share: random models, servers, clusters, reports."""
