"""What compiles graphs in this process: options, settings, caches, bundles and workers."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path

from lowering.build import Builder
from lowering.bundle import Bundle, Origin
from lowering.cache import ArtifactCache
from lowering.capabilities import load_capabilities
from lowering.compiler import Compiler
from lowering.denials import DenialRecord
from lowering.key import package_version
from lowering.pipeline import Toolchain
from lowering.service import Limits
from npu_iree import __version__
from npu_iree.errors import ArtifactError, OptionError
from npu_iree.kernels import registered_kernels
from npu_iree.options import Options
from npu_iree.settings import Settings
from npu_iree.tuning import tuning_for
from npu_iree.versions import VERIFIED
from npu_iree.workers import compile_service


def compiler_for(
    options: Options, folder: str = "graph0", counts: Counter[str] | None = None
) -> Compiler:
    """Return what plans and compiles graphs under these options.

    Args:
        options: of one `torch.compile` call.
        folder: of the graph's dumps.
        counts: what it does is added up here.
    """
    settings, target = Settings.read(), options.target_value
    limits = Limits(
        time_s=options.compile_time_limit_s, memory_bytes=options.compile_memory_limit_bytes
    )
    cache = _open_cache(settings.cache, settings.cache_limit_bytes) if settings.cache else None
    if cache is None and options.bundle is None and options.compile != "if_missing":
        raise OptionError(
            f"compile={options.compile!r} takes what was compiled before, and there is no bundle "
            "and no cache (NPU_IREE_CACHE is off)"
        )
    builder = Builder(
        target=target.compile,
        toolchain=Toolchain(
            service=compile_service(),
            limits=limits,
            flags=options.flags,
            kernels=registered_kernels(),
            fault=settings.fault,
        ),
        bundle=open_bundle(options.bundle, target.name) if options.bundle else None,
        cache=cache,
        may_compile=options.compile == "if_missing",
        dump=settings.dump / folder if settings.dump else None,
        counts=Counter() if counts is None else counts,
        tuning=tuning_for(options.tune, target),
    )
    capabilities = load_capabilities(target.compile.capabilities)
    return Compiler(
        builder=builder,
        capabilities=capabilities,
        forbid_host=options.fallback == "error",
        disabled_ops=options.disabled_ops,
        denials=DenialRecord(settings.cache / "denials.json") if settings.cache else None,
        origin=Origin(
            versions={
                "npu-iree": __version__,
                **{name: package_version(name) for name in VERIFIED},
            },
            target=target.name,
            cpu_features=(),
            capabilities=capabilities.digest,
            options=options.printable(),
        ),
    )


def open_bundle(path: Path, target: str) -> Bundle:
    """Open a bundle to be used for a target on this machine; one that is open is not read again.

    Raises:
        ArtifactError: it is damaged, of another format, or for another target or CPU.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise ArtifactError(path, error.strerror or str(error)) from error
    bundle = _read_bundle(path, (status.st_ino, status.st_mtime_ns, status.st_size))
    bundle.refuse_unless_for(target)
    return bundle


@functools.lru_cache(maxsize=16)
def _read_bundle(path: Path, version: tuple[int, ...]) -> Bundle:
    return Bundle(path)


@functools.cache
def _open_cache(folder: Path, limit_bytes: int) -> ArtifactCache:
    """Return the cache in a folder, the same one each time: it complains once."""
    return ArtifactCache(folder, limit_bytes)
