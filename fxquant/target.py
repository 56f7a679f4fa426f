"""What a device can run, as data: the protocol that ``targets/`` fills."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fxquant.scheme import Scheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A target's or a scheme's "no", with its reason in words."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """The op that stands for a dialect op on a target, and why this one was chosen."""

    op: str
    reason: str
    eager: str = ""
    """The op for calls outside of graphs; empty: ``op``.

    One with the dialect op's own signature, or one named ``linear``:
    ``linear(x, constants, bias, form, out_dtype)`` with the constants of the form in their order.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """The largest size that ``op`` takes on ``axis`` ("N", "K": output and input features, "E": experts)."""

    op: str
    axis: str
    maximum: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How the codes of a weight are to lie, why, and why not otherwise.

    ``kn``, ``nz``, ``held``, ``parts_n``, ``parts_k`` as in ``form.Form``. ``rejected``: alternatives and
    reasons.
    """

    kn: bool = False
    nz: bool = False
    held: str = ""
    parts_n: tuple[int, ...] = ()
    parts_k: tuple[int, ...] = ()
    host: bool = False
    """Not as codes: as floats in main memory, copied to the device for each call."""
    reason: str = ""
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A device family (or one chip and software version of it) as a table.

    ``kernels`` maps each dialect op that the target runs to the op that stands for it; ``limits``
    holds what no fake kernel checks. ``choose(scheme)`` gives the kernel for the products of a scheme, or
    why there is none (default: the kernel of its op), ``choose_grouped`` the same for experts.
    ``arrange(scheme=, n=, k=, dtype=, cuts=, bias=)`` decides how the codes of a weight lie (default:
    ``[N, K]`` in one part), with ``experts=`` in the place of the last two those of experts.
    ``lower(gm, proven)`` replaces dialect ops where renaming them is not enough (``proven``: guards outside
    of the graph hold for its sizes). All must be picklable. Tests pass their own
    ``Target`` to impose a limit.
    """

    name: str
    device_type: str
    kernels: Mapping[str, Kernel]
    limits: tuple[Limit, ...] = field(default=())
    choose: Callable[[Scheme], Kernel | Refusal] | None = None
    choose_grouped: Callable[[Scheme], Kernel | Refusal] | None = None
    arrange: Callable[..., Layout | Refusal] | None = None
    lower: Callable[[Any, bool], int] | None = None

    def eager_kernels(self) -> dict[str, str]:
        """For dialect ops, the ops that stand for them outside of graphs."""
        return {op: self.eager_kernel(op) for op in self.kernels}

    def eager_kernel(self, op: str) -> str:
        """The op that stands for ``op`` outside of graphs; empty where the target has none."""
        kernel = self.kernels.get(op)
        return (kernel.eager or kernel.op) if kernel is not None else ""

    def kernel_for(self, scheme: Scheme, *, grouped: bool = False) -> Kernel | Refusal:
        """What multiplies with weights of ``scheme``, ``grouped`` with experts, or why nothing does."""
        if grouped and scheme.act is not None and scheme.act.static:
            return Refusal(
                reason=f"scheme {scheme.name} has one scale for all inputs of a layer, experts need one "
                "each: give them a scheme with dynamic activations, such as int8, or a weight-only one"
            )
        if grouped and self.choose_grouped is not None:
            return self.choose_grouped(scheme)
        chosen = self.choose(scheme) if self.choose is not None else None
        if isinstance(chosen, Refusal) or (chosen is not None and not grouped):
            return chosen
        return self.kernel_of(scheme.grouped_op if grouped else scheme.op)

    def kernel_of(self, op: str) -> Kernel | Refusal:
        """What runs a dialect op, or that nothing does."""
        return self.kernels.get(op) or Refusal(reason=f"target {self.name} has no {op}")

    def lay_out(
        self,
        scheme: Scheme,
        *,
        n: int,
        k: int,
        dtype: object,
        cuts: tuple[int, ...] = (),
        bias: object = None,
    ) -> Layout | Refusal:
        """How the codes of a weight of float ``dtype`` lie, or why it cannot be held as codes.

        ``cuts``: where the graph cuts the output anyway; ``bias``: dtype of the bias, if there is one.
        """
        kernel = self.kernel_for(scheme)
        admitted = kernel if isinstance(kernel, Refusal) else self.admits(scheme.op, n=n, k=k)
        if isinstance(admitted, Refusal):
            return admitted
        if self.arrange is None:
            return Layout()
        return self.arrange(scheme=scheme, n=n, k=k, dtype=dtype, cuts=cuts, bias=bias)

    def lay_out_experts(
        self, scheme: Scheme, *, experts: int, n: int, k: int, dtype: object, one_by_one: bool = False
    ) -> Layout | Refusal:
        """The same for ``experts`` matrices ``[E, N, K]``, which are not cut into parts.

        ``one_by_one``: single experts are multiplied with, besides groups of rows with all of them.
        """
        ways = ((scheme.grouped_op, True), (scheme.op, False)) if one_by_one else ((scheme.grouped_op, True),)
        for op, grouped in ways:
            kernel = self.kernel_for(scheme, grouped=grouped)
            size = experts if grouped else None
            admitted = kernel if isinstance(kernel, Refusal) else self.admits(op, n=n, k=k, experts=size)
            if isinstance(admitted, Refusal):
                return admitted
        if self.arrange is None:
            return Layout(reason="experts apart")
        if one_by_one:
            return Refusal(reason=f"single experts: {self.name} takes codes in a layout of its own")
        return self.arrange(scheme=scheme, n=n, k=k, dtype=dtype, experts=experts)

    def admits(self, op: str, *, n: int, k: int, experts: int | None = None) -> Kernel | Refusal:
        """The kernel for ``op`` on weights of ``n`` output and ``k`` input features, or why not."""
        kernel = self.kernels.get(op)
        if kernel is None:
            return Refusal(reason=f"target {self.name} has no {op}")
        for limit in self.limits:
            size = {"N": n, "K": k, "E": experts}[limit.axis]
            if limit.op == op and size is not None and size > limit.maximum:
                return Refusal(
                    reason=f"{op} on {self.name} takes {limit.axis} <= {limit.maximum}, "
                    f"got {limit.axis} = {size} ({limit.source})"
                )
        return kernel
