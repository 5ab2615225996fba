"""Calls of the ops by DSA's layers."""

from mcore_patches.attention.common.telemetry import OpCalls

_calls = OpCalls()
count_in, count = _calls.count_in, _calls.count
