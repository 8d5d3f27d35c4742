"""Streaming blocks of weights through a ring of buffers, over an abstract device."""
