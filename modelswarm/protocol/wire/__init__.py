"""Bytes on the wire: protobuf messages, frames, codec."""
