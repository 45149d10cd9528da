"""Examples of the API reference: a prelude, then a block for each name behind a line `# cg.name`.

The blocks run one after the other, on four virtual ranks.
"""

import torch
from torch import nn

import cg


@cg.actor
class Stage(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.linear = nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x):
        return torch.tanh(self.linear(x))

    def loss(self, h, y):
        return nn.functional.mse_loss(h, y)

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


stages = [Stage.on(rank)(seed=rank) for rank in range(4)]
x, y = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0))


@cg.trace
def train(x, y):
    losses = []
    for h, target in cg.microbatches((x, y), 4):
        for stage in stages:
            h = stage.forward(h)
        losses.append(stages[-1].loss(h, target))
    loss = cg.mean(losses)
    cg.backward(loss)
    for stage in stages:
        stage.update()
    return loss


# cg.actor
@cg.actor
class Scale:
    def __init__(self, factor):
        self.factor = factor

    def apply(self, x):
        return self.factor * x


print(Scale.on(2)(3.0))  # on rank 2
print(Scale(3.0).apply(2))  # an ordinary object


# cg.trace
@cg.trace
def twice(x):
    return stages[1].forward(stages[0].forward(x))


print(twice(x).shape)


# cg.opaque
@cg.actor
class Log:
    @cg.opaque
    def line(self, loss):
        return f"loss {loss:.2f}"


log = Log.on(3)()


@cg.trace
def logged(h, y):
    return log.line(stages[3].loss(h, y))


print(logged(x, y))

# cg.carry
total = cg.carry(torch.zeros(()), on=1)


@cg.trace
def add(value):
    total.set(total.get() + value)
    return total.get()


print([float(add(torch.tensor(2.0))) for _ in range(3)])


# cg.remat
@cg.trace
def lean(x, y):
    loss = stages[0].loss(cg.remat(stages[0].forward)(x), y)
    cg.backward(loss)
    return loss


print(lean(x, y).shape)


# cg.keep
@cg.actor
class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = cg.keep(self.up(x))  # saved, whatever the memory is
        return self.down(torch.tanh(hidden))


print(Kept.on(0)())


# cg.recompute
@cg.actor
class Lean(Kept):
    def forward(self, x):
        hidden = cg.recompute(torch.tanh(self.up(x)))  # computed again in the backward
        return self.down(hidden)


print(Lean.on(0)())


# cg.offload
@cg.actor
class Resting(Kept):
    def forward(self, x):
        hidden = cg.offload(self.up(x))  # in the host's memory until the backward
        return self.down(torch.tanh(hidden))


print(Resting.on(0)())

# cg.mesh
grid = cg.mesh(pp=2, tp=2)
print(grid)
print([stage.ranks for stage in grid.unbind("pp")])

# cg.plan
plan = cg.plan({"forward(x)|loss(h)|loss(y)": cg.cut(0, "dp"), "linear.*": cg.whole})
print(Stage.on(cg.mesh(dp=4), plan=plan)())

# cg.plans
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(hidden_size=8, num_attention_heads=2, num_hidden_layers=1)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
print(cg.plans.hf(model, batch=None))

# cg.cut
plan = {"linear.weight": cg.cut(0, "tp"), "linear.bias": cg.cut(0, "tp")}
cut = Stage.on(cg.mesh(tp=4), plan=plan)()
print([list(piece.linear.weight.shape) for piece in cut.instances.values()])

# cg.whole
plan = {"forward(x)": cg.whole, "linear.*": cg.cut(0, "tp")}
print(Stage.on(cg.mesh(tp=2), plan=plan)().place)

# cg.fsdp
rows = {"forward(x)|loss(h)|loss(y)": cg.cut(0, "dp")}
stored = Stage.on(cg.mesh(dp=2), plan=rows, store=cg.cut(0, "dp"))()


@cg.trace
def sharded(x, y):
    loss = stored.loss(stored.forward(x), y)
    cg.backward(loss)
    stored.update()
    return loss


compiled = sharded.lower(x, y).compile(fsdp=cg.fsdp(keep="step", memory=1e6))
print(compiled.cost_analysis()[0].gathers)

# cg.float8
plan = cg.float8("linear", recipe="rowwise")
narrow = Stage.on(0, plan=plan)()
print(plan)

# cg.layout
rows = Stage.on(cg.mesh(dp=2), plan={"forward(x)": cg.cut(0, "dp")})()


@cg.trace
def turned(x):
    return cg.layout(rows.forward(x), cg.cut(1, "dp"))  # columns: an exchange of all with all


lowered = turned.lower(x)
print(next(line.strip() for line in lowered.as_text().splitlines() if "8,8/dp" in line))
print(turned(x).shape)


# cg.layout_rule
@torch.library.custom_op("readers::row_norms", mutates_args=())
def row_norms(x: torch.Tensor) -> torch.Tensor:
    return x.norm(dim=1)  # a kernel of your own


row_norms.register_fake(lambda x: x.new_empty(x.shape[0]))
cg.layout_rule(torch.ops.readers.row_norms.default, "rc->r", cut="r")


@cg.actor
class Norms:
    def forward(self, x):
        return row_norms(x)


norms = Norms.on(cg.mesh(dp=2), plan={"forward(x)": cg.cut(0, "dp")})()


@cg.trace
def normed(x):
    return norms.forward(x)


print(torch.equal(normed(x).cpu(), x.norm(dim=1)))


# cg.expert_linear
weight = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))  # three experts
tokens, ids = x[:4], torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
routed = cg.expert_linear(tokens, weight, ids)
print(routed.shape, torch.allclose(routed[0, 1], weight[2] @ tokens[0], atol=1e-6))


# cg.expert_capacity
taken = cg.expert_capacity(ids, experts=3, capacity=0.75)
print(taken, (~taken).sum())


# cg.on
@cg.trace(inputs=cg.on(0), outputs=cg.on(3))
def sent(x):
    return stages[3].forward(x)


print(sent.lower(x).compile())


# cg.object
@cg.actor
class Upper:
    @cg.opaque
    def upper(self, text):
        return text.upper()


upper = Upper.on(1)()


@cg.trace
def shout(text):
    return upper.upper(text)


print(shout.lower(cg.object).compile()("hello"))


# cg.microbatches
@cg.trace
def in_parts(x):
    return torch.cat([stages[0].forward(part) for part in cg.microbatches(x, 4)])


print(torch.allclose(in_parts(x), stages[0].local.forward(x)))


# cg.mean
@cg.trace
def mean_loss(x, y):
    return cg.mean([stages[0].loss(a, b) for a, b in cg.microbatches((x, y), 2)])


print(torch.allclose(mean_loss(x, y).cpu(), (x - y).square().mean()))


# cg.backward
@cg.trace
def gradients(x, y):
    loss = stages[0].loss(stages[0].forward(x), y)
    cg.backward(loss)
    return loss


gradients(x, y)
print(stages[0].local.linear.weight.grad.shape)


# cg.clip_grad_norm
@cg.trace
def clipped(x, y):
    loss = stages[1].loss(stages[1].forward(stages[0].forward(x)), y)
    cg.backward(loss)
    return cg.clip_grad_norm(stages[:2], max_norm=0.01)


print(clipped(x, y) > 0.01)


# cg.all_reduce
@cg.trace
def sums(x):
    return cg.all_reduce([stage.forward(x) for stage in stages], op="sum")[0]


print(sums(x).shape)


# cg.all_gather
@cg.trace
def gathered(x):
    return cg.all_gather([stage.forward(x) for stage in stages], dim=0)[0]


print(gathered(x).shape)


# cg.reduce_scatter
@cg.trace
def scattered_sums(x):
    return cg.reduce_scatter([stage.forward(x) for stage in stages], op="sum", dim=0)[2]


print(scattered_sums(x).shape)


# cg.all_to_all
@cg.trace
def exchanged(x):
    return cg.all_to_all([stage.forward(x) for stage in stages])[1]


print(exchanged(x).shape)


# cg.broadcast
@cg.trace
def copies(x):
    return cg.broadcast(stages[0].forward(x), stages)[3]


print(copies(x).shape)


# cg.gather
@cg.trace
def on_one(x):
    return cg.gather([stage.forward(x) for stage in stages], root=stages[0])


print(on_one(x).shape)


# cg.scatter
@cg.trace
def parts(x):
    return cg.scatter(stages[0].forward(x), stages)[1]


print(parts(x).shape)


# cg.via
@cg.trace
def by_hosts(x):
    return stages[1].forward(cg.via(stages[0].forward(x), "cpu"))


print("via = cpu" in by_hosts.lower(x).as_text())

# cg.rank
print(cg.rank())

# cg.world_size
print(cg.world_size())

# cg.restarts
print(cg.restarts())

# cg.barrier
cg.barrier()  # behind it, every rank has come here

# cg.allgather
print(cg.allgather({"rank": cg.rank()}))

# cg.save
cg.save("stages.safetensors", {f"{i}.": stage for i, stage in enumerate(stages)})

from safetensors import safe_open

with safe_open("stages.safetensors", "pt") as file:
    print(list(file.keys())[:2])

# cg.load
cg.save("one.safetensors", {"": stages[0]})
cg.load("one.safetensors", {"": stages[1]})
print(torch.equal(stages[0].local.linear.weight, stages[1].local.linear.weight))

# cg.cut_layers
layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
cuts = cg.cut_layers(layers, 2, example={"input": x})
print(cuts)
moving = cuts.part(0)(None, x)
print(torch.equal(cuts.part(1)(moving, x), layers(x)))

# cg.expert_choices
from transformers import MixtralConfig, MixtralForCausalLM

sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "vocab_size": 9}
heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 4}
torch.manual_seed(0)
mixture = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
with cg.expert_choices(mixture, capacity=1.0) as choices:
    mixture(torch.arange(8).view(1, 8))
print(choices.counts(), choices.dropped())

# cg.empty_weights
with cg.empty_weights():
    empty = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
print(empty[0].weight.device)

# cg.pretrained
from safetensors.torch import save_file

save_file(layers.state_dict(), "model.safetensors")


@cg.actor
class Half(nn.Module):
    def __init__(self, index):
        super().__init__()
        self.part = cg.cut_layers(empty, 2, example={"input": x}).part(index)


halves = [Half.on(rank, init=cg.pretrained("."))(rank) for rank in range(2)]
print(torch.equal(halves[1].local.part.model[3].weight.cpu(), layers[3].weight))

# cg.keep_quantized
import json
from pathlib import Path

settings = {"quant_method": "fp8", "weight_block_size": [4, 4]}
Path("small").mkdir()
Path("small/config.json").write_text(json.dumps({"quantization_config": settings}))
levels = torch.ones(8, 8).to(torch.float8_e4m3fn)
stored = {"0.weight": levels, "0.weight_scale_inv": torch.full((2, 2), 0.5)}
save_file(stored, "small/model.safetensors")
with cg.empty_weights():
    small = nn.Sequential(nn.Linear(8, 8, bias=False))
print(sorted(cg.keep_quantized(small, cg.pretrained("small"))))

# cg.quantization
print(cg.quantization("small"), cg.quantization("."))

# cg.save_checkpoint
cg.save_checkpoint("runs/step-1", halves, state={"batches": 1})

# cg.newest_checkpoint
print(cg.newest_checkpoint("runs"))

# cg.load_checkpoint
print(cg.load_checkpoint("runs/step-1", halves))

# cg.schedules
print(cg.schedules.names())
print(train.lower(x, y).compile(schedule=cg.schedules.by_name("zb-h1")))

# cg.Step
print(train)
print(train(x, y).shape, train)
print(train.compilations)

# cg.Lowered
lowered = train.lower(x, y)
print(lowered)
print(lowered.as_text("placed").splitlines()[0])

# cg.Compiled
compiled = train.lower(x, y).compile()
compiled(x, y)
print(compiled.statistics().executions, compiled.cost_analysis()[1].messages_sent)

# cg.load_plan
compiled.save("train.plan")
print(cg.load_plan(train.lower(x, y), "train.plan"))


# cg.Optimistic
@cg.trace
def bold(x, y):
    loss = stages[0].loss(stages[0].forward(x), y)
    cg.backward(loss)
    cg.clip_grad_norm(stages[:1], max_norm=100.0)
    stages[0].update()
    return loss


optimistic = bold.lower(x, y).compile_optimistic()
print(optimistic(x, y).shape)

# cg.profile
with cg.profile("run.json") as profile:
    train(x, y)


# cg.Future
@cg.trace(inputs=cg.on(0), outputs=cg.on(0))
def graph(x):
    return stages[0].forward(x)


with graph.lower(x).compile(max_inflight=2) as compiled:
    futures = [compiled.execute(x) for _ in range(2)]
    print([future.result(timeout=5).shape for future in futures])

# cg.ActorHandle
stage = stages[2]
print(stage.name, stage.rank, stage.is_local, stage.local.linear)

# cg.Place
print(cg.on(2).ranks, cg.on(0, 3).ranks)

# cg.measure
costs = cg.measure(train.lower(x, y).compile(), x, y)
print(type(costs).__name__)

# cg.Costs
print(train.lower(x, y).compile().simulate(cg.Costs()).makespan)

# cg.Link
print(cg.Link(latency=0.01, bandwidth=10e6))


# cg.TraceError
@cg.trace
def branch(x):
    return x if x.sum() > 0 else -x


try:
    branch(x)
except cg.TraceError as error:
    print(error.remedy.partition(",")[0])

# cg.RemoteError
try:
    shout.lower(cg.object).compile()(3)  # 3 has no upper()
except cg.RemoteError as error:
    print(error.type_name, error.rank, error.method)

# cg.InputError
try:
    train.lower(x, y).compile()(x[:4], y)
except cg.InputError as error:
    print(str(error).partition(",")[0])

# cg.ActorError
try:
    Stage.on(7)()
except cg.ActorError as error:
    print(str(error).partition(";")[0])

# cg.PlanFileError
try:
    cg.load_plan(train.lower(x[:4], y[:4]), "train.plan")
except cg.PlanFileError as error:
    print(str(error).partition(",")[0])

# cg.CapacityError
with graph.lower(x).compile(max_inflight=2) as compiled:
    try:
        future = compiled.execute(x, block=False)
    except cg.CapacityError:
        print("two executions are in flight: come back later")
    else:
        print(future.result().shape)

# cg.StepTimeout
compiled = train.lower(x, y).compile(timeout=60.0)
try:
    compiled(x, y)
except cg.StepTimeout as error:
    print(error)  # where this rank waits, and for whom
    raise

# cg.IRError
from cg.ir.text.parser import parse_module

try:
    parse_module("module @step {")
except cg.IRError as error:
    print(error.diagnostics[0].message)
