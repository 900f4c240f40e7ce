"""KV pages: allocation, admission, transfer."""
