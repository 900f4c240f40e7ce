"""Which spans, how many servers, what fits: plain values in, plain values out."""
