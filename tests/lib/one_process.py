"""Environment of servers and engines that tests start for something else than how they are started."""

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
"""Engine and worker are one process, which is up 5 s sooner than vLLM's default of two on CPUs and leaves the
cores alone while it waits.  The README's server and the demo run as vLLM runs by default."""
