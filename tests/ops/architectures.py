"""Architectures that the kernels are for, and how many bytes of shared memory a block of theirs may take."""

SHARED_BYTES = {
    arch: kib * 1024
    for arch, kib in {
        "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_103a": 227, "sm_120a": 99,
    }.items()
}  # fmt: skip
