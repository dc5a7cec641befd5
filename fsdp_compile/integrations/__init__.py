"""Strategies and plugins for other libraries; each file imports its library, and nothing else here does."""
