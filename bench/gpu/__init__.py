"""The CUDA path on one GPU: correct tokens, speeds against the roofline, a hop, a kill. `python -m bench.gpu`."""
