"""Placement: spans, slots, memory and KV room of servers; plain values in, plain values out."""
