"""Names in a pickle that mean code execution, processes, imports or files when a trusting loader resolves them."""

from __future__ import annotations

from functools import lru_cache

__all__ = ["COMPUTED", "dangerous"]

COMPUTED = "?.?"
"""A global whose name the pickle computes instead of writing it, which no library does."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULES = _words(
    """os posix nt posixpath ntpath subprocess sys shutil socket pty importlib imp runpy ctypes _ctypes code codeop pdb
    bdb timeit cProfile profile webbrowser multiprocessing pickle _pickle dill cloudpickle joblib marshal tempfile pip
    asyncio signal threading _thread http urllib ftplib smtplib telnetlib xmlrpc requests httpx aiohttp commands popen2
    platform pkgutil zipimport distutils setuptools venv ensurepip idlelib lib2to3 doctest trace linecache gc inspect
    types functools operator builtins.__import__ fileinput glob pathlib io _io sqlite3 site sysconfig nturl2path
    ssl select selectors mmap resource faulthandler unittest"""
)
"""Top-level modules whose members run code, start processes, import or touch files."""

_HARMLESS = frozenset(
    {
        "types.SimpleNamespace",
        "functools.partial",
        "operator.getitem",
        "pathlib.Path",
        "pathlib.PosixPath",
        "pathlib.WindowsPath",
        "pathlib.PurePath",
        "pathlib.PurePosixPath",
        "pathlib.PureWindowsPath",
        "pathlib._local.Path",
        "pathlib._local.PosixPath",
        "pathlib._local.WindowsPath",
        "torch.jit._pickle.build_intlist",
        "torch.jit._pickle.build_doublelist",
        "torch.jit._pickle.build_boollist",
        "torch.jit._pickle.build_tensorlist",
        "torch.jit._pickle.build_tensor_from_id",
        "torch.jit._pickle.restore_type_tag",
        "io.BytesIO",
        "_io.BytesIO",
        "signal.Signals",
    }
)
"""Members of those modules that training code stores and that do nothing when constructed."""

_BUILTINS = _words(
    """eval exec compile open input breakpoint __import__ globals locals vars setattr delattr memoryview help exit quit
    apply execfile file reload"""
)

_MEMBERS = _words(
    """system popen spawn spawnl spawnv execv execve exec eval fork Popen check_output check_call __import__
    import_module __globals__ __builtins__ __subclasses__ __reduce__ __reduce_ex__ __code__ __init_subclass__ __loader__
    run_path run_module load_module exec_module __getattribute__ __dict__"""
)
"""Attribute names that, reached through any module by a dotted name or getattr, amount to the same."""

_ROOMS = (
    "torch.hub.",
    "torch.jit.",
    "torch._inductor.",
    "torch._dynamo.",
    "torch.utils.cpp_extension.",
    "torch.utils.bottleneck.",
    "torch.utils.collect_env.",
    "torch.distributed.rpc.",
    "torch.distributed.run.",
    "torch.distributed.launch",
    "torch.distributed.elastic.",
    "torch.multiprocessing.",
    "torch.package.",
    "torch.testing._internal.",
    "torch.serialization.load",
    "numpy.f2py.",
    "numpy.testing.",
    "numpy.distutils.",
    "numpy.ctypeslib.",
    "numpy.lib.npyio.",
    "numpy.lib._npyio_impl.",
    "logging.config.",
    "pandas.eval",
    "pandas.io.",
    "pandas.core.computation.",
    "sympy.parsing.",
    "sympy.utilities.",
    "IPython.",
    "nltk.",
    "pydoc.",
    "_pyrepl.",
    "tensorflow.io.",
    "tensorflow.python.framework.load_library.",
    "paramiko.",
    "fabric.",
    "psutil.",
)
"""Beginnings of names in packages of numerical work whose members compile, load, download or start something."""

_MODULE_NAMES = frozenset(
    {"os", "posix", "nt", "subprocess", "sys", "importlib", "builtins", "shutil", "socket", "ctypes", "pty", "runpy"}
)
"""Modules that other modules import, and that a dotted name reaches through them."""

_EXACT = frozenset(
    {
        "torch.load",
        "torch.hub.load",
        "torch.hub.load_state_dict_from_url",
        "torch.hub.download_url_to_file",
        "torch.serialization.load",
        "torch.jit.load",
        "torch.compile",
        "torch.ops.load_library",
        "torch.utils.cpp_extension.load",
        "torch.utils.cpp_extension.load_inline",
        "torch.utils._config_module.ConfigModule.load_config",
        "torch._dynamo.guards.GuardBuilder.get",
        "torch.fx.graph_module.reduce_graph_module",
        "torch.fx.experimental.symbolic_shapes.ShapeEnv.evaluate_guards_expression",
        "torch.distributed.rpc.rpc_sync",
        "numpy.load",
        "numpy.fromfile",
        "numpy.memmap",
        "numpy.core.memmap",
        "numpy.testing._private.utils.runstring",
        "pandas.read_pickle",
        "yaml.unsafe_load",
        "yaml.load",
        "logging.config.dictConfig",
    }
)


@lru_cache(maxsize=4096)
def dangerous(dotted: str) -> bool:
    """Return whether the name, as a pickle has it (module, a dot, and a possibly dotted name), is a dangerous one.

    A dotted name counts by any of its parts that is a dangerous module, so that ``torch.serialization.os.system`` is
    seen as well as ``os.system``.
    """
    if dotted in _HARMLESS:
        return False
    if dotted in _EXACT or dotted.startswith(_ROOMS) or dotted == COMPUTED:
        return True
    parts = dotted.split(".")
    if parts[0] in ("builtins", "__builtin__"):
        return any(part in _BUILTINS or part in _MEMBERS for part in parts[1:])
    if parts[0] in _MODULES:
        return True
    if any(part in _MEMBERS for part in parts[1:]):
        return True
    return any(part in _MODULE_NAMES for part in parts[1:])
