"""Shared parts of the end-to-end tools: arms, servers, load, evidence, statistics, reports."""
