"""The fake device: stands in for a device on a machine that has none.

In: the work that `../devices` puts on any device, torch's operators, and calls of a library of
messages. Out: values in the host's memory, and the waits and refusals of a real device.
`torch_backend` makes it known to torch, `kernels` computes in `host_memory`, `device` has the
streams (`queues`) and the graphs (`op_recorder`), and `library` joins devices of one machine.
"""
