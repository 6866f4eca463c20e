"""Compiled blocks: each kind of block is traced once, with its rules as ordinary operations, and
compiled by torch.compile.

Autograd functions are opaque to a compiler, and compiled code does not run under a mode. So a block
is traced into a graph (block inputs, weights, zeros) -> (output, inputs of the sinks): zeros are
added to every output of a rule, and their gradient is the output's. The graph has ordinary
operations only, and blocks of one kind share it.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

from dpvision.dp.batch_dims import Call, Source, block_call, tensors_in
from dpvision.dp.interception import GraphChanged, InterceptedPass, Tap
from dpvision.dp.rule import NoRule
from dpvision.dp.weight_grads import Slot
from dpvision.errors import ConfigError
from dpvision.precision import autocast_dtype


@dataclass(eq=False)
class _Program:
    """A compiled kind of block."""

    run: Callable[..., Any]
    calls: tuple[Call, ...]
    sources: tuple[Source, ...]
    """Of the output's tensors, within the block."""
    taps: list[Tap]
    template: dict[str, Slot]
    """Slots that the sinks fill, by the parameter's name within the block; ``Pending.settle`` moves
    their content to the block's slots.
    """


@dataclass(eq=False)
class Pending:
    """A block between its forward and its backward pass."""

    program: _Program
    zeros: list[Tensor]
    saved: list[tuple[Tensor | None, ...]]
    slots: dict[str, Slot]

    def settle(self, grads: tuple[Tensor | None, ...]) -> None:
        """Pass the outputs' gradients to the sinks, and their results to the block's slots."""
        for (
            left_over
        ) in self.program.template.values():  # by a pass that failed, out of memory for example
            left_over.release()
        with torch.no_grad():
            for tap, saved, grad in zip(self.program.taps, self.saved, grads, strict=True):
                if grad is not None:
                    tap.sink(*saved, grad)
        for name, filled in self.program.template.items():
            slot = self.slots[name]
            if filled.written_BW is not None:
                slot.add_written(filled.written_BW)
            slot.outers += filled.outers
            filled.release()


class CompiledBlocks:
    """Compiled programs of a model's repeated blocks, for ``clipped_sum(..., blocks=...)``; the
    model itself is not changed.
    """

    def __init__(self, blocks: dict[str, nn.Module], num_records: int, backend: str) -> None:
        self._blocks, self._backend = blocks, backend
        self.num_records = num_records
        """Records of the physical batches that the blocks are compiled for."""
        self.programs: dict[Any, _Program | None] = {}
        """By block and its arguments' shapes and types; None if the block runs uncompiled."""
        self._compiled: dict[Any, Callable[..., Any]] = {}
        """By the graph's code: blocks share a compiled program only if all their constants are
        equal.
        """

    @contextlib.contextmanager
    def intercepted(self, run: InterceptedPass, pending: list[Pending]) -> Iterator[None]:
        """Within this context ``run`` sees each block as one call and runs it compiled if possible,
        adding it to ``pending``.
        """
        run.run_block = partial(self._run, pending)
        with contextlib.ExitStack() as stack:
            for name, block in self._blocks.items():
                own = vars(block)  # an instance attribute takes precedence over the class's method
                own["forward"] = partial(block_call, name, block.forward)
                stack.callback(own.pop, "forward")
            yield

    def _run(
        self,
        pending: list[Pending],
        outer: InterceptedPass,
        name: str,
        _forward: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> tuple[int, Any, tuple[Source, ...]] | None:
        """Run one block as a compiled program.

        Returns:
            (number of calls that it replaces, its output, ``_Program.sources``); None if it must
            run uncompiled (non-tensor arguments, a layer without a rule).
        """
        block = self._blocks[name]
        params: dict[str, Tensor] = dict(block.named_parameters())
        tensors = [a for a in args if isinstance(a, Tensor)]
        trained = [p for p in params.values() if p.requires_grad]
        ruled = bool(trained) and all(map(outer.knows, trained))
        if outer.num_records != self.num_records or len(tensors) < len(args) or kwargs or not ruled:
            return None
        about = tuple(
            (a.shape, a.dtype, a.device, a.requires_grad) for a in (*tensors, *params.values())
        )
        kind = name, about, block.training, autocast_dtype(tensors[0].device)
        if kind not in self.programs:
            self.programs[kind] = self._compile(outer, block, tensors, params)
        program = self.programs[kind]
        if program is None or program.calls != outer.coming()[: len(program.calls)]:
            return None
        zeros = [
            torch.zeros((), dtype=h.dtype, device=tensors[0].device)
            .expand(h.shape)
            .requires_grad_()
            for h in program.taps
        ]
        weights = [p.detach() for p in params.values()]
        output, saved = program.run(tensors, weights, zeros)
        slots = {name: outer.slot(params[name], "") for name in program.template}
        pending.append(Pending(program, zeros, saved, slots))  # type: ignore[arg-type]
        return len(program.calls), output, program.sources

    def _compile(
        self,
        outer: InterceptedPass,
        block: nn.Module,
        args: list[Tensor],
        params: dict[str, Tensor],
    ) -> _Program | None:
        state: dict[str, Any] = {}

        def forward(args: list[Tensor], weights: list[Tensor], zeros: list[Tensor] | None) -> Any:
            given = dict(zip(params, weights, strict=True))
            inner = InterceptedPass(
                {name: given[name] for name, p in params.items() if p.requires_grad},
                outer.coming(),
                outer.num_records,
                {},
                args,
            )
            inner.traced, inner.zeros = True, zeros
            with inner, torch.enable_grad():
                output = functional_call(block, given, tuple(args))
            state["inner"], state["given"] = inner, given
            made = tensors_in((output,), {})
            inner.check_backward(made)
            state["sources"] = inner.sources.of(made)
            return output, [h.saved for h in inner.taps]

        def leaves() -> list[Tensor]:
            return [p.detach().requires_grad_(p.requires_grad) for p in params.values()]

        arguments = [a.detach().requires_grad_(a.requires_grad) for a in args]
        try:
            forward(arguments, leaves(), None)
        except (NoRule, GraphChanged):
            return None
        inner, given = state["inner"], state["given"]
        if any(slot.weight is not given[next(iter(slot.names))] for slot in inner.slots):
            # a weight computed from parameters, even transposed: its gradient is not the
            # parameter's
            return None
        zeros = [
            torch.zeros(h.shape, dtype=h.dtype, device=args[0].device, requires_grad=True)
            for h in inner.taps
        ]
        graph = make_fx(forward)(arguments, leaves(), zeros)
        inner = state["inner"]
        if any(True for _ in graph.buffers()):
            # a tensor of the block besides its parameters: it could change after the trace
            return None
        same = (
            graph.code,
            tuple((t.shape, t.dtype, t.device) for t in (*arguments, *params.values(), *zeros)),
        )
        if same not in self._compiled:
            self._compiled[same] = torch.compile(graph, backend=self._backend, dynamic=False)
        taps = [Tap(h.shape, h.dtype, (), h.sink) for h in inner.taps]
        for slot in inner.slots:
            slot.open = True
        template = {next(iter(slot.names)): slot for slot in inner.slots}
        calls = outer.coming()[: inner.position]
        return _Program(self._compiled[same], calls, state["sources"], taps, template)


def compile_blocks(model: nn.Module, num_records: int, backend: str = "inductor") -> CompiledBlocks:
    """Find a model's repeated blocks, to be compiled at first use by ``clipped_sum(...,
    blocks=...)``.

    A block is a member of an ``nn.ModuleList`` or ``nn.Sequential`` that holds two or more modules
    of its class, with parameters. Blocks whose constants are all equal share a program. A block
    runs uncompiled if it takes non-tensor arguments, computes a weight from parameters, or has
    buffers or a layer without a rule.

    Args:
        num_records: records of a full physical batch, the size to compile for; batches of other
            sizes run uncompiled.
        backend: backend of torch.compile.

    Raises:
        ConfigError: the model has no repeated blocks.
    """
    blocks: dict[str, nn.Module] = {}
    for name, holder in model.named_modules():
        if not isinstance(holder, nn.ModuleList | nn.Sequential):
            continue
        kinds = [type(child) for child in holder]
        for key, child in holder.named_children():
            repeated = kinds.count(type(child)) > 1 and "forward" not in vars(child)
            if repeated and any(True for _ in child.parameters()) and list(child.children()):
                blocks[f"{name}.{key}"] = child
    if not blocks:
        raise ConfigError(
            "compile: no repeated blocks in this model; expected an nn.ModuleList or "
            "nn.Sequential of them. Leave compile out."
        )
    return CompiledBlocks(blocks, num_records, backend)
