"""NVTX ranges, traces and Nsight command lines."""
