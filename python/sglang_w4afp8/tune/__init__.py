"""Tuning on the GPU at hand: what is measured becomes the files that serving chooses by. Behind ``sglang-w4afp8 tune``."""
