"""Measuring on a GPU: timing, cells, providers and the tuner. Imported by the command line and by ``benchmark/`` only."""
