"""Which vLLM releases this package was measured on."""

from __future__ import annotations

import warnings

from packaging.version import Version

# On the CPU the whole suite runs; on CUDA 0.26 was measured and later ones are accepted.
CPU = (Version("0.27.1"), Version("0.33"))
CUDA = (Version("0.26"), Version("0.27"))
CUDA_ACCEPTED = Version("0.33")


def check(version: str, cpu: bool) -> bool:
    """Whether vLLM ``version`` is verified on such a machine; warns by name where unknown.

    Later CUDA releases up to the newest one known are accepted without a warning and are
    not verified.
    """
    found = Version(version).release
    release = Version(".".join(map(str, found)))
    low, high = CPU if cpu else CUDA
    verified = low <= release < high
    if not verified and not (not cpu and high <= release < CUDA_ACCEPTED):
        warnings.warn(
            f"vLLM {version} on {'the CPU' if cpu else 'CUDA'} was never measured with "
            f"nnterp-vllm (verified: {low} to before {high}); run model.verify() before you "
            f"trust its values",
            stacklevel=3,
        )
    return verified
