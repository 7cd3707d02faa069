"""Measure, decide and route append-prefill on prefill/decode-disaggregated vLLM."""

__version__ = "0.1.0"
