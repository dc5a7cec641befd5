"""Layout: which parameters travel together, where each of them lies, in which precision. No ranks, no communication."""
