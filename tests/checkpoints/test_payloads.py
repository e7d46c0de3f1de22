"""A payload in every place where a pickle can hide: it is reported, and it leaves no trace."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanprobe.checkpoints import index_checkpoint
from nanprobe.checkpoints.unsafe import dangerous
from tests.checkpoints import layouts
from tests.checkpoints.make import FLAT
from tests.checkpoints.test_hostile import Payload

Place = Callable[[Path, Payload, int], Path]


def plain_pickle(folder: Path, payload: Payload, protocol: int) -> Path:
    (folder / "a.pkl").write_bytes(pickle.dumps({"w": np.ones(2), "bad": payload}, protocol=protocol))
    return folder / "a.pkl"


def zipped(folder: Path, payload: Payload, protocol: int) -> Path:
    torch.save({**FLAT, "bad": payload}, folder / "a.pt", pickle_protocol=protocol)
    return folder / "a.pt"


def legacy(folder: Path, payload: Payload, protocol: int) -> Path:
    torch.save(
        {**FLAT, "bad": payload}, folder / "a.pt", pickle_protocol=protocol, _use_new_zipfile_serialization=False
    )
    return folder / "a.pt"


def metadata(folder: Path, payload: Payload, protocol: int) -> Path:
    layouts.split_dcp(folder / "dcp")
    original = pickle.loads((folder / "dcp" / ".metadata").read_bytes())
    original.storage_meta = payload
    (folder / "dcp" / ".metadata").write_bytes(pickle.dumps(original, protocol=protocol))
    return folder / "dcp"


def distributed_object(folder: Path, payload: Payload, protocol: int) -> Path:
    path = layouts.save_dcp(folder / "dcp", {"w": torch.ones(3), "extra": {"bad": [payload]}})
    assert protocol in range(6)
    return path


def optimizer_states(folder: Path, payload: Payload, protocol: int) -> Path:
    layouts.save_deepspeed(folder, 1)
    path = folder / "global_step2" / "layer_00_expert_0_mp_rank_00_model_states.pt"
    torch.save({"bad": payload}, path, pickle_protocol=protocol)
    return folder


def universal(folder: Path, payload: Payload, protocol: int) -> Path:
    layouts.save_universal(folder)
    path = folder / "global_step2_universal" / "zero" / "fc.bias" / "exp_avg.pt"
    torch.save({"param": torch.ones(4), "bad": payload}, path, pickle_protocol=protocol)
    return folder


def common(folder: Path, payload: Payload, protocol: int) -> Path:
    layouts.save_megatron(folder)
    torch.save({"args": payload}, folder / "iter_0000005" / "common.pt", pickle_protocol=protocol)
    return folder


def model_rank(folder: Path, payload: Payload, protocol: int) -> Path:
    layouts.save_megatron_legacy(folder)
    path = folder / "iter_0000005" / "mp_rank_00" / "distrib_optim.pt"
    torch.save({"bad": payload}, path, pickle_protocol=protocol)
    return folder


def trainer(folder: Path, payload: Payload, protocol: int) -> Path:
    layouts.save_trainer(folder)
    torch.save(payload, folder / "training_args.bin", pickle_protocol=protocol)
    return folder


def random_states(folder: Path, payload: Payload, protocol: int) -> Path:
    layouts.save_accelerate(folder)
    (folder / "random_states_1.pkl").write_bytes(pickle.dumps(payload, protocol=protocol))
    return folder


def archive(folder: Path, payload: Payload, protocol: int) -> Path:
    torch.save({"bad": payload}, folder / "model_weights.ckpt", pickle_protocol=protocol)
    with tarfile.open(folder / "a.nemo", "w:gz" if protocol % 2 else "w") as tar:
        tar.add(folder / "model_weights.ckpt", "model_weights.ckpt")
    return folder / "a.nemo"


def object_array(folder: Path, payload: Payload, protocol: int) -> Path:
    array = np.array([payload], dtype=object)
    if protocol == 0:
        np.save(folder / "a.npy", array, allow_pickle=True)
        return folder / "a.npy"
    (np.savez if protocol % 2 else np.savez_compressed)(folder / "a.npz", a=array)
    return folder / "a.npz"


def pickled_tensor(folder: Path, payload: Payload, protocol: int) -> Path:
    """A storage inside a pickle is a file of its own, with pickles of its own."""
    inner = pickle.dumps(payload, protocol=2)

    class Nested:
        def __reduce__(self) -> tuple[Any, ...]:
            magic = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2) + pickle.dumps(1001, protocol=2)
            storage = (
                b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ."
            )
            data = magic + inner + storage + pickle.dumps(["0"], protocol=2) + (1).to_bytes(8, "little") + bytes(4)
            return torch.storage._load_from_bytes, (data,)

    (folder / "a.pkl").write_bytes(pickle.dumps({"w": Nested()}, protocol=protocol))
    return folder / "a.pkl"


PLACES: list[Place] = [
    plain_pickle,
    zipped,
    legacy,
    metadata,
    distributed_object,
    optimizer_states,
    universal,
    common,
    model_rank,
    trainer,
    random_states,
    archive,
    object_array,
    pickled_tensor,
]


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__)
@pytest.mark.parametrize("protocol", range(6))
def test_nothing_runs(tmp_path: Path, place: Place, protocol: int) -> None:
    trace = tmp_path / "trace"
    index = index_checkpoint(place(tmp_path, Payload(trace), protocol))
    unsafe = [problem for problem in index.problems if problem.rule == "unsafe-pickle"]
    assert [problem.evidence["name"] for problem in unsafe] == ["builtins.eval"]
    assert unsafe[0].severity == "error"
    assert not unsafe[0].blocking
    assert not trace.exists()


def test_the_payload_is_no_dud(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Payload(tmp_path / "trace")))
    assert (tmp_path / "trace").exists()


@pytest.mark.parametrize(
    "name",
    [
        "runpy.run_path",
        "pty.spawn",
        "ctypes.CDLL",
        "builtins.compile",
        "builtins.open",
        "importlib.import_module",
        "torch.load",
        "torch.jit._serialization.load",
        "torch.utils._pytree.os.system",
        "numpy.core._internal.sys",
        "operator.attrgetter",
        "functools.reduce",
        "shutil.rmtree",
        "pathlib.Path.unlink",
        "webbrowser.open",
        "socket.create_connection",
        "builtins.getattr.__globals__",
        "cloudpickle.cloudpickle._make_function",
        "dill._dill._create_code",
        "pickle.loads",
        "types.CodeType",
        "types.FunctionType",
        "bdb.Bdb.run",
        "code.InteractiveInterpreter.runcode",
        "logging.config.listen",
        "joblib.load",
        "sympy.parsing.sympy_parser.parse_expr",
        "torch._inductor.codecache.compile_file",
        "torch.distributed.rpc.rpc_async",
        "numpy.testing._private.utils.runstring",
        "pydoc.pipepager",
        "idlelib.run.Executive.runcode",
        "asyncio.unix_events._UnixSubprocessTransport._start",
        "ensurepip._run_pip",
        "lib2to3.pgen2.grammar.Grammar.loads",
        "_pyrepl.pager.pipe_pager",
        "torch.utils.bottleneck.__main__.run_cprofile",
        "timeit.timeit",
        "distutils.file_util.write_file",
    ],
)
def test_names_that_mean_code(name: str) -> None:
    assert dangerous(name)


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\ngetattr\n(cmodule\nmake\n)RS'system'\ntR.",
        b"\x80\x04cmodule\nmake\n)R\x8c\x06system\x93.",
        b"cnumpy.core._internal\nsys\n.",
    ],
)
def test_names_that_are_computed(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.pkl").write_bytes(data)
    assert "unsafe-pickle" in {problem.rule for problem in index_checkpoint(tmp_path / "a.pkl").problems}


@pytest.mark.parametrize(
    "name",
    [
        "torch._utils._rebuild_parameter",
        "torch.serialization._get_layout",
        "torch.storage._load_from_bytes",
        "torch.nn.modules.linear.Linear",
        "torch.optim.lr_scheduler.LambdaLR",
        "torch.distributed.checkpoint.metadata.Metadata",
        "torch.distributed.tensor._api.DTensor",
        "transformers.training_args.TrainingArguments",
        "transformers.trainer_utils.IntervalStrategy",
        "accelerate.state.PartialState",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "megatron.core.enums.ModelType",
        "omegaconf.listconfig.ListConfig",
        "argparse.Namespace",
        "collections.defaultdict",
        "typing.Any",
        "builtins.dict",
        "builtins.slice",
        "builtins.complex",
        "numpy.dtype",
        "numpy._core.multiarray.scalar",
        "numpy.random._pickle.__randomstate_ctor",
        "datetime.datetime",
        "enum.Enum",
        "ultralytics.nn.tasks.DetectionModel",
        "pathlib.PosixPath",
        "_codecs.encode",
        "torch.device",
        "functools.partial",
        "types.SimpleNamespace",
        "copyreg._reconstructor",
        "fractions.Fraction",
        "decimal.Decimal",
        "uuid.UUID",
    ],
)
def test_names_that_mean_none(name: str) -> None:
    assert not dangerous(name)
