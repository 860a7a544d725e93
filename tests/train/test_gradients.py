"""Gradient methods against autograd, against closed forms of linear fields, and their order of convergence."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from odevit_serve.config import Architecture, Config, Integration, Preprocessing
from odevit_serve.solvers import order
from odevit_serve.train import recipe
from odevit_serve.train.gradients import GRADIENTS
from odevit_serve.train.model import ODEViT
from odevit_serve.train.objective import Distillation
from odevit_serve.train.recipe import Training

Loss = Callable[[list[Tensor], list[Tensor]], Tensor]
PIXELS = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(5), dtype=torch.double)


class Fields(nn.Module):
    """x' = A tanh(x) + B x + c: two fields with parameters of their own."""

    def __init__(self, curved: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a = nn.Parameter(0.4 * torch.randn(4, 4, dtype=torch.double))
        self.b = nn.Parameter(0.4 * torch.randn(4, 4, dtype=torch.double) - 0.5 * torch.eye(4, dtype=torch.double))
        self.c = nn.Parameter(torch.randn(4, dtype=torch.double))
        self.curved = curved

    @property
    def fields(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        return self.attention, self.mlp

    def attention(self, x: Tensor) -> Tensor:
        return (x.tanh() if self.curved else x) @ self.a.mT

    def mlp(self, x: Tensor) -> Tensor:
        return x @ self.b.mT + self.c


def last(states: list[Tensor], velocities: list[Tensor]) -> Tensor:
    return states[-1].square().sum()


def on_the_way(states: list[Tensor], velocities: list[Tensor]) -> Tensor:
    """States in mid-course, and the velocity: an integral over time, so that it converges as the steps get smaller."""
    middle = states[len(states) // 2 - 1]
    return middle.sin().sum() + sum(v.square().mean() for v in velocities) / len(velocities)  # type: ignore[return-value]


def gradients(
    name: str,
    steps: int,
    loss: Loss = last,
    horizon: float = 2.0,
    solver: str = "euler",
    splitting: str = "parallel",
    module: Fields | None = None,
    **settings: int,
) -> list[Tensor]:
    """Of the loss, with respect to the first state and every parameter."""
    module = module or Fields()
    x = torch.linspace(-1, 1, 8, dtype=torch.double).reshape(2, 4).requires_grad_()
    chosen = dataclasses.replace(Training(), **settings)  # type: ignore[arg-type]
    parameters = list(module.parameters())
    advance = GRADIENTS[name](parameters, steps, chosen)
    state, memory, states, velocities = x, [], [], []
    for _ in range(steps):
        state, velocity, memory = advance(module.fields, state, horizon / steps, memory, solver, splitting)
        states.append(state)
        velocities.append(velocity)
    found = torch.autograd.grad(loss(states, velocities), [x, *parameters], allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip([x, *parameters], found)]


def distance(a: list[Tensor], b: list[Tensor]) -> float:
    return math.sqrt(sum(float((p - q).square().sum()) for p, q in zip(a, b)))


def test_each_name_of_a_recipe_is_a_method() -> None:
    assert tuple(GRADIENTS) == recipe.GRADIENTS


@pytest.mark.parametrize("solver", ["euler", "ab2", "rk4"])
@pytest.mark.parametrize("loss", [last, on_the_way])
def test_recomputing_steps_changes_no_gradient(solver: str, loss: Loss) -> None:
    assert (
        distance(gradients("checkpoint", 5, loss, solver=solver), gradients("backprop", 5, loss, solver=solver)) < 1e-12
    )


def test_truncated_gradients_are_those_of_the_last_steps_alone() -> None:
    """For x' = (A + B) x + c: dL/dc through the last k Euler steps is h (sum over j < k of (I + hM)^j)' dL/dx."""
    module, steps, h, kept = Fields(curved=False), 6, 1 / 3, 2
    start, _, _, of_c = gradients("truncated", steps, module=module, gradient_steps=kept)
    assert not start.any()
    step = torch.eye(4, dtype=torch.double) + h * (module.a + module.b).detach()
    x = torch.linspace(-1, 1, 8, dtype=torch.double).reshape(2, 4)
    for _ in range(steps):
        x = x @ step.mT + h * module.c.detach()
    expected = h * sum((2 * x).sum(0) @ torch.linalg.matrix_power(step, j) for j in range(kept))
    torch.testing.assert_close(of_c, expected)
    every = gradients("truncated", steps, module=module, gradient_steps=steps)
    assert distance(every, gradients("backprop", steps, module=module)) < 1e-12


SCHEMES = [("euler", "parallel"), ("ab2", "parallel"), ("midpoint", "parallel"), ("heun", "parallel"),
           ("rk4", "parallel"), ("euler", "lie"), ("midpoint", "strang")]  # fmt: skip


@pytest.mark.parametrize("loss", [last, on_the_way])
@pytest.mark.parametrize(("solver", "splitting"), SCHEMES)
def test_the_error_of_the_adjoint_falls_with_the_order_of_the_solver(solver: str, splitting: str, loss: Loss) -> None:
    errors = []
    for steps in (16, 32, 64):
        scheme = {"loss": loss, "solver": solver, "splitting": splitting}
        errors.append(distance(gradients("adjoint", steps, **scheme), gradients("backprop", steps, **scheme)))  # type: ignore[arg-type]
    expected = order(solver, splitting)
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert slopes[-1] > expected - 0.25, (errors, slopes)
    assert errors[-1] > 1e-13  # not backprop under another name


def test_the_adjoint_of_a_linear_field_is_the_matrix_exponential() -> None:
    """x' = Mx, L = w x(T): dL/dx(0) = exp(MT)' w, dL/dM = integral of a(t) x(t)'."""
    module = Fields(curved=False)
    with torch.no_grad():
        module.b.zero_()
        module.c.zero_()
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.double)
    found = gradients("adjoint", 64, lambda states, _: (states[-1] @ weights).sum(), solver="rk4", module=module)
    m, horizon = module.a.detach(), 2.0
    x = torch.linspace(-1, 1, 8, dtype=torch.double).reshape(2, 4)
    flow = torch.linalg.matrix_exp(m * horizon)
    torch.testing.assert_close(found[0], (flow.mT @ weights).expand(2, 4), rtol=1e-7, atol=1e-7)
    integral = torch.zeros(4, 4, dtype=torch.double)
    nodes, count = torch.linspace(0, horizon, 2001, dtype=torch.double), 2000
    for i, t in enumerate(nodes):  # Simpson's rule
        factor = 1 if i in (0, count) else 4 if i % 2 else 2
        a = torch.linalg.matrix_exp(m * (horizon - t)).mT @ weights
        integral += factor * torch.outer(a, torch.linalg.matrix_exp(m * t) @ x.sum(0))
    torch.testing.assert_close(found[1], integral * horizon / count / 3, rtol=1e-6, atol=1e-6)


def test_states_that_are_kept_are_not_integrated_back() -> None:
    """Along a stiff decay, going back from the end loses the state; from every fifth step less of it is lost."""
    module = Fields()
    with torch.no_grad():
        module.b.copy_(-3 * torch.eye(4))
    wanted = gradients("backprop", 40, horizon=4.0, module=module)
    every, fifth, none = (
        distance(gradients("adjoint", 40, horizon=4.0, module=module, gradient_steps=kept), wanted)
        for kept in (1, 5, 0)
    )
    assert every < fifth < 0.7 * none, (every, fifth, none)


def test_a_loss_that_reads_no_further_than_mid_course_and_a_second_backward_pass() -> None:
    early: Loss = lambda states, _: states[2].square().sum()  # noqa: E731
    for steps in (40, 80):
        wanted = gradients("backprop", steps, early, solver="heun")
        assert distance(gradients("adjoint", steps, early, solver="heun"), wanted) < 1e-3
    module = Fields()
    x = torch.ones(1, 4, dtype=torch.double)
    advance = GRADIENTS["adjoint"](list(module.parameters()), 4, Training())
    memory: list[Tensor] = []
    for _ in range(4):
        x, _, memory = advance(module.fields, x, 0.1, memory, "euler", "parallel")
    first = torch.autograd.grad(x.sum(), module.c, retain_graph=True)[0]
    torch.testing.assert_close(torch.autograd.grad(x.sum(), module.c)[0], first, rtol=0, atol=0)


def test_nothing_but_the_end_is_held_by_the_adjoint() -> None:
    """States that nobody else holds are gone: the memory of the method does not grow with the steps."""
    import weakref

    module = Fields()
    advance = GRADIENTS["adjoint"](list(module.parameters()), 20, Training())
    x, memory, seen = torch.ones(1, 4, dtype=torch.double), [], []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: pytest.fail("the graph saves a tensor"), lambda t: t):
        for _ in range(20):
            x, _, memory = advance(module.fields, x, 0.1, memory, "euler", "parallel")
            seen.append(weakref.ref(x.untyped_storage()))
    assert sum(ref() is not None for ref in seen[:-1]) == 0


def resting(module: Fields) -> Tensor:
    """The resting point of the linear field: -(A + B)^-1 c."""
    return torch.linalg.solve((module.a + module.b), -module.c).detach()


@pytest.fixture
def stable() -> Fields:
    module = Fields(curved=False)
    with torch.no_grad():
        module.b.copy_(-1.5 * torch.eye(4) + 0.2 * torch.randn(4, 4))
        module.a.mul_(0.4)
    return module


@pytest.mark.parametrize("window", [0, 4])
def test_the_implicit_gradient_is_that_of_the_resting_point(stable: Fields, window: int) -> None:
    """x* = -M^-1 c: dL/dc = -M^-T dL/dx*, dL/dM = (dL/dc) x*', for the solver and Anderson acceleration."""
    found = gradients("implicit", 60, horizon=24.0, module=stable, gradient_steps=60, anderson=window)
    m, x = (stable.a + stable.b).detach(), resting(stable)
    of_c = -torch.linalg.solve(m.mT, 2 * (2 * x))  # two images at the same point
    torch.testing.assert_close(found[3], of_c, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[1], torch.outer(of_c, x), rtol=1e-6, atol=1e-8)
    assert not found[0].any()  # where it came from is forgotten
    exact = gradients("backprop", 400, horizon=160.0, module=stable)
    torch.testing.assert_close(found[2], exact[2], rtol=1e-6, atol=1e-8)


def test_iterations_of_the_implicit_gradient_are_steps_of_a_truncated_one(stable: Fields) -> None:
    """At the resting point all steps are alike: k iterations see what k + 1 steps do, none see the last step."""
    for iterations in (1, 3):
        found = gradients("implicit", 80, horizon=32.0, module=stable, gradient_steps=iterations)
        wanted = gradients("truncated", 80, horizon=32.0, module=stable, gradient_steps=iterations + 1)
        assert distance(found, wanted) < 1e-8
    free = gradients("jacobian-free", 80, horizon=32.0, module=stable)
    one = gradients("truncated", 80, horizon=32.0, module=stable, gradient_steps=1)
    assert distance(free, one) < 1e-8
    exact = gradients("backprop", 80, horizon=32.0, module=stable)
    assert sum(float((f * e).sum()) for f, e in zip(free, exact)) > 0  # a direction of descent, for this field


@pytest.mark.parametrize("attention", ["dot", "l2"])
@pytest.mark.parametrize("name", GRADIENTS)
def test_every_method_sees_the_same_trajectory_of_a_model(name: str, attention: str) -> None:
    """And for a small enough step the adjoint's gradient of psi is that of autograd."""
    shape = Architecture(16, 4, 24, 3, 2.0, 5, 1, attention=attention, convolution=3)
    torch.manual_seed(0)
    student = ODEViT(Config(shape, Integration(0.5, 16, "midpoint"), Preprocessing((3, 16, 16)))).double()
    with torch.no_grad():
        student.head.weight.normal_()
    labels = torch.tensor([0, 1, 2])

    def run(gradient: str) -> tuple[Tensor, dict[str, Tensor]]:
        weights = {"cross_entropy": 1.0, "intermediate": 1.0, "transport": 1.0}
        objective = Distillation(student, Training(gradient=gradient, gradient_steps=16), weights)
        terms = objective(PIXELS, labels, None, {}, 16, 0.5)
        student.zero_grad()
        sum(terms.values()).backward()  # type: ignore[union-attr]
        found = {n: p.grad.clone() for n, p in student.named_parameters() if p.grad is not None}
        return torch.stack(list(terms.values())).detach(), found

    terms, found = run(name)
    wanted_terms, wanted = run("backprop")
    torch.testing.assert_close(terms, wanted_terms)
    assert found["head.weight"].any()
    assert found["psi.mlp.up.weight"].any()
    if name in ("backprop", "checkpoint", "truncated", "adjoint"):
        for key, gradient in wanted.items():
            size = float(gradient.norm()) + 1e-9
            assert float((found[key] - gradient).norm()) < 2e-3 * size, key
    else:
        assert "cls" not in found
