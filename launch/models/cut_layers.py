"""`cg.cut_layers`: a model becomes the stages of a pipeline, unchanged inside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import nn

from ...tracer.values.heap.gradient_hooks import has_refused_hooks, post_accumulate_hooks
from .analysis import Analysis, analyse
from .balance import balance
from .chain import Chain, find_lists
from .cut_model import Cuts, ModelCosts
from .example_inputs import example_of
from .experts import choose_experts
from .fake_run import order_layers


def cut_layers(
    model: nn.Module,
    stages: int | Sequence[int],
    costs: Sequence[float] | Literal["flops", "bytes"] = "flops",
    *,
    example: Mapping[str, Any] | None = None,
    layers: str | Sequence[str] | None = None,
    experts: str | None = None,
) -> Cuts:
    """Cut a model between its layers into the stages of a pipeline.

    The model's forward runs once, on fake tensors, and is left as it is, but for `experts`. A stage
    has the parameters that its part of the forward uses: the first one an embedding, the last one a
    norm and a head. Each stage computes by itself what depends on the inputs alone, such as masks
    and rotary tables. What else it needs of earlier stages goes through all stages between: of an
    encoder and a decoder, each stage of the decoder takes what the encoder gives. A parameter that
    several stages use and that is trained, such as tied embeddings, is in the first of them alone,
    and goes to the others as a value (`ModelPart.lend`). One that is frozen is in each.

    ```python
    with cg.empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    cuts = cg.cut_layers(model, 4)
    print(cuts)
    ```

    Args:
        model: a model of transformers, or any other with lists of layers, `ModuleList` or
            `Sequential`, that it runs one after the other. It may be on the meta device. It should
            be in the mode in which it trains: a stage that would draw again what another has drawn
            is seen only if it is drawn.
        stages: how many, or the number of layers of each.
        costs: by which the dearest stage is made as cheap as can be: "flops" of one forward,
            "bytes" of parameters, or a number for each layer. With two numbers more, the first is
            of what comes before the layers and the last of what comes after them.
        example: the model's inputs by name, for that one run; the models of transformers that take
            texts or images need none.
        layers: the path of the list of layers, or several. By default these are the list with most
            parameters among those that the model runs, and all others that have at least as many
            as a layer of that one and that the model runs once, in order. All that are not chosen
            are part of what is around the layers. Layers are numbered in the order in which they
            run.
        experts: how a mixture of experts of transformers computes them: "cg", by
            `cg.expert_linear`, or one of transformers' implementations, such as "batched_mm". None
            is "cg" in the place of transformers' defaults, which are "grouped_mm" and "eager", and
            leaves another choice as it is.

    Returns:
        The stages, whose `str` is a table of them; `part(i)` makes the module of one.

    Raises:
        ValueError: the model has no such layers, fewer than stages, or runs one of them more than
            once; layers or what is around them take what another layer computes and does not give,
            or random numbers that several stages would draw; the model cannot run on the example;
            the costs are not those of its layers; it has no such experts; or a parameter has a
            gradient hook.
    """
    _refuse_hooks(model)
    choose_experts(model, experts)
    lists = find_lists(model, layers)
    inputs = example_of(model) if example is None else example
    chain = order_layers(model, lists, inputs, chosen=layers is not None)
    analysis = analyse(model, chain, inputs)
    chosen = _costs(model, chain, analysis, costs)
    return Cuts(model, chain, analysis, _lengths(model, chain, analysis, chosen, stages), chosen)


def _refuse_hooks(model: nn.Module) -> None:
    """Refuse hooks of parameters: the modules of stages have copies, which have no hooks."""
    for name, parameter in model.named_parameters():
        if has_refused_hooks(parameter) or post_accumulate_hooks(parameter):
            raise ValueError(
                f"'{name}' of {type(model).__name__} has a gradient hook, and the stages have "
                "copies of its parameters, without hooks; remove it, and let the actor of the "
                "stage register it by register_post_accumulate_grad_hook in its constructor"
            )


def _costs(
    model: nn.Module,
    chain: Chain,
    analysis: Analysis,
    costs: Sequence[float] | Literal["flops", "bytes"],
) -> ModelCosts:
    if costs == "flops" and any(analysis.flops):
        return ModelCosts("FLOPs", analysis.flops)
    if isinstance(costs, str):
        if costs not in ("flops", "bytes"):
            raise ValueError(f'costs is \'{costs}\'; give "flops", "bytes" or a number a layer')
        sizes = {name: p.numel() * p.element_size() for name, p in model.named_parameters()}
        parts = (analysis.before, *analysis.layers, analysis.after)
        return ModelCosts("bytes", tuple(sum(sizes[name] for name in part) for part in parts))
    values, count = tuple(costs), len(chain.layers)
    if len(values) == count:
        values = (0.0, *values, 0.0)
    if len(values) != count + 2 or any(not cost >= 0 for cost in values):
        raise ValueError(
            f"{len(tuple(costs))} costs are given for the {count} layers of {chain.name}; give "
            f"{count} numbers that are not negative, or {count + 2}, with what comes before and "
            "after"
        )
    return ModelCosts("as given", values)


def _lengths(
    model: nn.Module,
    chain: Chain,
    analysis: Analysis,
    costs: ModelCosts,
    stages: int | Sequence[int],
) -> list[int]:
    """The number of layers of each stage."""
    count, model_name = len(chain.layers), type(model).__name__
    refusals = {i: b.refusal for i, b in enumerate(analysis.boundaries, 1) if b.refusal}
    if not isinstance(stages, int):
        lengths = list(stages)
        if sum(lengths) != count or min(lengths, default=0) < 1:
            raise ValueError(
                f"stages of {', '.join(map(str, lengths))} layers are asked for, and {model_name} "
                f"has {count} in {chain.name}; give each at least one, {count} in all"
            )
        starts = [sum(lengths[:i]) for i in range(1, len(lengths))]
        for start in starts:
            if start in refusals:
                raise ValueError(
                    f"{model_name} cannot be cut in front of {chain.paths[start]}: "
                    f"{refusals[start]}"
                )
        return lengths
    if not 1 <= stages <= count:
        raise ValueError(
            f"{stages} stages are asked for, and {model_name} has {count} layers in "
            f"{chain.name}; each stage has at least one"
        )
    before, *layer_costs, after = costs.values
    balanced = balance(layer_costs, stages, before, after, lambda index: index not in refusals)
    if balanced is None:
        index, why = next(iter(refusals.items()))
        raise ValueError(
            f"{model_name} cannot be cut into {stages} stages; in front of {chain.paths[index]}, "
            f"for one: {why}"
        )
    return balanced
