"""Workloads are real, repeatable training steps, and what cannot be built says why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from elbowroom import capture, workloads
from elbowroom.errors import UsageError
from elbowroom.workloads import build
from tests.models import MODELS

needs_packages = pytest.mark.skipif(
    any(importlib.util.find_spec(package) is None for package in ("torchvision", "timm", "transformers")),
    reason="torchvision, timm and transformers are not all installed",
)

SMALL_IMAGES: dict[str, Any] = {"batch": 2, "image_size": 32}
SMALL_TEXT: dict[str, Any] = {"batch": 2, "sequence_length": 16, "layers": 1}


@needs_packages
@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("torchvision:resnet18", SMALL_IMAGES),
        ("torchvision:lraspp_mobilenet_v3_large", SMALL_IMAGES),
        ("timm:vit_tiny_patch16_224", SMALL_IMAGES),
        ("transformers:distilgpt2", SMALL_TEXT),
        ("transformers:bert-base-uncased", SMALL_TEXT),
        ("transformers:t5-small", SMALL_TEXT),
        ("transformers:ViTConfig", {**SMALL_IMAGES, "layers": 1}),
    ],
)
def test_a_workload_trains_and_repeats_itself(spec: str, options: dict[str, Any]) -> None:
    workload = build(spec, **options)
    assert workload.name == spec
    assert workload.model.training
    assert all(len(tensor) == 2 for tensor in workload.batch.values())
    before = [parameter.detach().clone() for parameter in workload.model.parameters()]
    first, second = workload.step(), workload.step()
    assert first.dim() == 0 and not first.requires_grad and first.isfinite()
    assert first != second
    assert all(parameter.grad is None for parameter in workload.model.parameters())
    changed = [not torch.equal(a, b) for a, b in zip(before, workload.model.parameters(), strict=True)]
    assert sum(changed) > 0.9 * len(changed)
    again = build(spec, **options)
    assert torch.equal(again.step(), first)
    assert torch.equal(again.forward().detach(), second)


@needs_packages
def test_forward_gives_the_loss_of_the_step_with_its_graph() -> None:
    workload = build("torchvision:resnet18", **SMALL_IMAGES)
    loss = workload.forward()
    assert loss.requires_grad
    assert torch.equal(loss.detach(), build("torchvision:resnet18", **SMALL_IMAGES).step())


@needs_packages
def test_the_seed_decides_weights_batch_and_dropout() -> None:
    def loss(seed: int) -> torch.Tensor:
        return build("torchvision:mobilenet_v3_small", **SMALL_IMAGES, seed=seed).step()

    assert torch.equal(loss(1), loss(1))
    assert not torch.equal(loss(1), loss(2))
    # What was drawn before does not matter: the generator is seeded at the end of the build as well.
    workload = build("torchvision:mobilenet_v3_small", **SMALL_IMAGES, seed=1)
    state = torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(state, torch.random.get_rng_state())
    assert torch.equal(workload.step(), loss(1))


@needs_packages
def test_options_reach_the_model() -> None:
    workload = build("torchvision:resnet18", **SMALL_IMAGES, dtype="bfloat16", channels_last=True, optimizer="sgd")
    seen = []
    convolution = workload.model.get_submodule("layer4.1.conv1")
    weight = convolution.get_parameter("weight")
    convolution.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output)))
    workload.step()
    (given, made), *_ = seen
    assert made.dtype == torch.bfloat16
    assert workload.batch["images"].is_contiguous(memory_format=torch.channels_last)
    assert weight.dtype == torch.float32
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert given.is_contiguous(memory_format=torch.channels_last)
    assert isinstance(workload.optimizer, torch.optim.SGD)
    assert isinstance(build("torchvision:resnet18", **SMALL_IMAGES).optimizer, torch.optim.AdamW)
    assert workload.batch["images"].shape == (2, 3, 32, 32)
    text = build("transformers:gpt2", **SMALL_TEXT)
    assert text.batch["input_ids"].shape == (2, 16)
    assert len(list(text.model.get_submodule("transformer.h").children())) == 1


@needs_packages
def test_the_trace_of_gpt2_prints_as_one_line() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = build("transformers:gpt2", batch=1, sequence_length=8)
    trace = capture(workload.step, workload.model, workload.optimizer, name="transformers:gpt2")
    assert len(trace.ops) > 1000
    shown = repr(trace)
    assert len(shown) < 200 and "\n" not in shown
    assert shown.startswith(
        f"<Trace of 'transformers:gpt2' on cpu: {len(trace.ops)} ops, {len(trace.storages)} storages"
    )


@needs_packages
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("gpt2", 124_439_808),
        ("bert-base-uncased", 109_514_298),
        ("roberta-base", 124_697_433),
        ("t5-small", 60_506_624),
        ("opt-125m", 125_239_296),
        ("llama-3-8b", 8_030_261_248),
    ],
)
def test_published_names_have_the_published_size_and_need_no_memory_under_fake_tensors(
    name: str, parameters: int
) -> None:
    with FakeTensorMode():
        workload = build(f"transformers:{name}", batch=1, sequence_length=8)
        loss = workload.forward()
    assert isinstance(loss, FakeTensor)
    assert sum(parameter.numel() for parameter in workload.model.parameters()) == parameters


@needs_packages
@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        ("torchvision:resnet5", {}, "resnet50"),
        ("torchvision:fasterrcnn_resnet50_fpn", {}, "no classifier or segmenter"),
        ("torchvision:resnet18", {"sequence_length": 8}, "torchvision:resnet18 takes no sequence_length"),
        ("torchvision:resnet18", {"layers": 8}, "takes no layers"),
        ("timm:resnet5000", {}, "resnet50"),
        ("timm:hf-hub:owner/name", {}, "no model 'hf-hub:owner/name'"),
        ("timm:resnet18", {"sequence_length": 8}, "it takes images"),
        ("transformers:gpt22", {}, "gpt2"),
        ("transformers:zzzzzzzzzzzz", {}, "examples: "),
        ("transformers:PretrainedConfig", {}, "no model"),
        ("transformers:gpt2", {"image_size": 32}, "transformers:gpt2 takes no image_size"),
        ("transformers:gpt2", {"channels_last": True}, "it takes text"),
        ("transformers:gpt2", {"sequence_length": 1025}, "at most 1024"),
        ("transformers:roberta-base", {"sequence_length": 513, "layers": 1}, "of transformers:roberta-base, 512"),
        ("transformers:wav2vec2", {}, "neither a language model nor an image classifier"),
        ("transformers:clip", {}, "several models"),
        ("transformers:resnet", {"layers": 3}, "does not count layers"),
    ],
)
def test_what_a_package_cannot_build_says_why(spec: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build(spec, **options)


@pytest.mark.parametrize("spec", ["", ":", "resnet50", "torchvision:", ":resnet50"])
def test_a_malformed_spec_is_refused_with_the_sources_there_are(spec: str) -> None:
    with pytest.raises(UsageError, match="timm:NAME, torchvision:NAME, transformers:NAME"):
        build(spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch must be a whole number of at least 1, not 0"),
        ({"batch": -3}, "not -3"),
        ({"batch": 2.0}, "not 2.0"),
        ({"batch": True}, "not True"),
        ({"image_size": 0}, "image_size"),
        ({"sequence_length": "8"}, "sequence_length"),
        ({"dtype": "float16"}, "dtype must be one of float32, bfloat16"),
        ({"optimizer": "adam"}, "optimizer must be one of adamw, sgd"),
        ({"seed": -1}, "seed"),
        ({"device": "tpu"}, "device must be"),
        ({"device": "cuda:"}, "device must be"),
        ({"device": "cpu:x"}, "device must be"),
        ({"device": "cuda:99"}, "cuda:99"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build("torchvision:resnet18", **options)


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for source in workloads.sources():
        with pytest.raises(UsageError, match=rf"{source} is not installed; run: pip install 'elbowroom\[models\]'"):
            build(f"{source}:resnet18")


# Functions of the user's own ------------------------------------------------------------------------------------------

OWN_MODULE = """
    import torch
    from elbowroom.workloads import Workload

    def plain():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batch = torch.randn(4, 3)
        def step():
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss
        return model, optimizer, step

    calls = []
    def with_options(batch=32, *, device, dtype="own", seed=None):
        calls.append((batch, device, dtype, seed))
        return plain()
    def with_any(**options):
        calls.append(options)
        return plain()
    def whole():
        model, optimizer, step = plain()
        return Workload(name="own", model=model, optimizer=optimizer, step=step, forward=step, batch={})
    def demanding(path): return plain()
    def two(): return plain()[:2]
    def no_model(): return 1, *plain()[1:]
    def no_step(): return *plain()[:2], None
    def no_loss(): return *plain()[:2], lambda: 1.0
    def failing(): raise KeyError("mine")
    number = 3
"""


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_training_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN_MODULE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_a_function_in_the_current_folder_is_a_workload(own_module: str) -> None:
    path = list(sys.path)
    workload = build(f"{own_module}:plain")
    assert sys.path == path
    first = workload.step()
    assert not first.requires_grad
    assert workload.step() < first
    assert torch.equal(build(f"{own_module}:plain").step(), first)
    assert not torch.equal(build(f"{own_module}:plain", seed=5).step(), first)
    with pytest.raises(UsageError, match="must return a Workload"):
        workload.forward()
    whole = build(f"{own_module}:whole")
    assert whole.name == f"{own_module}:whole"
    assert torch.equal(whole.forward().detach(), first)


def test_a_function_gets_the_options_that_were_given(own_module: str) -> None:
    build(f"{own_module}:with_options")
    build(f"{own_module}:with_options", batch=8, seed=7, dtype="bfloat16")
    build(f"{own_module}:with_any", layers=3)
    calls = sys.modules[own_module].calls
    assert calls == [(32, "cpu", "own", None), (8, "cpu", "bfloat16", 7), {"layers": 3}]


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        ("plain", {"batch": 8}, "takes no batch: it takes no options"),
        ("with_options", {"image_size": 8}, "it takes batch, device, dtype, seed"),
        ("demanding", {}, "requires path"),
        ("plane", {}, "no function 'plane'; similar names: plain"),
        ("number", {}, "is a int, not a function"),
        ("two", {}, "not tuple"),
        ("no_model", {}, "returns a int instead of a torch Module"),
        ("no_step", {}, "its step is a NoneType"),
    ],
)
def test_a_function_that_does_not_fit_is_refused(
    own_module: str, function: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        build(f"{own_module}:{function}", **options)


def test_errors_of_the_users_own_code_are_passed_on(own_module: str, tmp_path: Path) -> None:
    path = list(sys.path)
    with pytest.raises(KeyError, match="mine"):
        build(f"{own_module}:failing")
    (tmp_path / "own_broken.py").write_text("import there_is_no_such_module")
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_module"):
        build("own_broken:plain")
    assert sys.path == path
    with pytest.raises(UsageError, match="must return the loss as a tensor, not float"):
        build(f"{own_module}:no_loss").step()


@pytest.mark.parametrize("module", ["there_is_no_such_module", f"{__name__}.below", "timn", ".relative", "a..b"])
def test_a_module_that_is_not_there_is_refused(module: str) -> None:
    with pytest.raises(UsageError, match="neither from timm, torchvision, transformers nor a"):
        build(f"{module}:resnet18")


# torchvision without its operators ------------------------------------------------------------------------------------

FAKE_TORCHVISION = {
    "fails": """
        import torch
        from torchvision import part
        if not hasattr(torch.ops.torchvision, "nms"):
            raise RuntimeError("operator torchvision::nms does not exist")
        models = True
        """,
    "works": "models = True",
    "broken": "raise RuntimeError('built for another machine')",
}
IMPORT_IT = """
    import sys, torch, elbowroom.workloads
    assert "torchvision" not in sys.modules
    from elbowroom.errors import UsageError
    from elbowroom.workloads._packages import import_package
    try:
        print(import_package("torchvision").models, end=" ")
    except UsageError as error:
        print(error, end=" ")
    print(hasattr(torch.ops.torchvision, "nms"), hasattr(torch.ops.torchvision, "qnms"))
"""


@pytest.mark.parametrize(
    ("kind", "printed"),
    [("fails", "True True True"), ("works", "True False False"), ("broken", "built for another machine False False")],
)
def test_operators_are_declared_only_where_torchvision_has_none(tmp_path: Path, kind: str, printed: str) -> None:
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(textwrap.dedent(FAKE_TORCHVISION[kind]))
    (package / "part.py").touch()
    source = str(Path(workloads.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), source))}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IMPORT_IT)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith(printed)


# The cases of the other tests -----------------------------------------------------------------------------------------


@needs_packages
@pytest.mark.parametrize("name", ["unet", "lstm", "gpt2_accumulation", "t5"])
def test_a_case_made_twice_gives_the_same_bits(name: str) -> None:
    case, runs = MODELS[name](), []
    for _ in range(2):
        model, _, step = case.make()
        state = torch.random.get_rng_state()
        losses = torch.stack([step(index) for index in range(2)])
        assert case.draws == (not torch.equal(state, torch.random.get_rng_state()))
        runs.append((losses, [parameter.detach() for parameter in model.parameters()]))
    assert torch.equal(runs[0][0], runs[1][0])
    assert all(torch.equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True))
