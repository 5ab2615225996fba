"""One module per patch: its descriptor (`PATCH`), its probe and its glue. README.md beside this is the removal plan.

The registry imports every module here, so none may import torch or megatron at module level.
"""
