"""The manifests and the image of examples/kubernetes: their fields, and that they agree."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from cg.launch.environment.config import VARIABLES

from ..mpi.jobs import ROOT

pytest.importorskip("aiohttp")

from examples.serve import __main__ as serving

FOLDER = ROOT / "examples" / "kubernetes"
IMAGE = (FOLDER / "Dockerfile").read_text()
STRING, COUNT = {"type": "string", "minLength": 1}, {"type": "integer", "minimum": 1}
STRINGS = {"type": "array", "items": STRING, "minItems": 1}
LABELS = {"type": "object", "additionalProperties": STRING}
QUANTITY = {"type": ["string", "integer"], "pattern": r"^\d+(m|Ki|Mi|Gi|Ti)?$"}
PORT = {"type": ["string", "integer"]}


def fields(*optional: str, **known: Any) -> dict[str, Any]:
    """An object with these fields alone; all but the optional ones are required."""
    required = [name for name in known if name not in optional]
    return {
        "type": "object",
        "properties": known,
        "required": required,
        "additionalProperties": False,
    }


def listed(item: Any) -> dict[str, Any]:
    return {"type": "array", "items": item, "minItems": 1}


METADATA = fields("labels", "name", name=STRING, labels=LABELS)
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY}
PROBE = fields(
    *("httpGet", "tcpSocket", "periodSeconds", "failureThreshold"),
    httpGet=fields(path={"type": "string", "pattern": "^/"}, port=PORT),
    tcpSocket=fields(port=PORT),
    periodSeconds=COUNT,
    failureThreshold=COUNT,
)
SECRET = fields(secretKeyRef=fields(name=STRING, key=STRING))
CONTAINER = fields(
    *("args", "env", "ports", "startupProbe", "readinessProbe", "livenessProbe"),
    name=STRING,
    image=STRING,
    workingDir=STRING,
    securityContext=fields(runAsUser=COUNT),
    command=STRINGS,
    args=STRINGS,
    env=listed(fields("value", "valueFrom", name=STRING, value=STRING, valueFrom=SECRET)),
    ports=listed(fields(name=STRING, containerPort=COUNT)),
    startupProbe=PROBE,
    readinessProbe=PROBE,
    livenessProbe=PROBE,
    resources=fields(limits=AMOUNTS),
    volumeMounts=listed(fields(name=STRING, mountPath=STRING)),
)
CLAIM = fields(claimName=STRING)
MEMORY = fields(medium={"const": "Memory"}, sizeLimit=QUANTITY)
VOLUME = fields(
    *("persistentVolumeClaim", "emptyDir"),
    name=STRING,
    persistentVolumeClaim=CLAIM,
    emptyDir=MEMORY,
)
TEMPLATE = fields(
    "metadata",
    metadata=METADATA,
    spec=fields(
        "terminationGracePeriodSeconds",
        terminationGracePeriodSeconds=COUNT,
        containers=listed(CONTAINER),
        volumes=listed(VOLUME),
    ),
)
REPLICAS = fields(
    replicas=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=TEMPLATE,
)
SPECS = {
    "kubeflow.org/v2beta1 MPIJob": fields(
        slotsPerWorker=COUNT,
        mpiImplementation={"enum": ["OpenMPI", "Intel", "MPICH"]},
        launcherCreationPolicy={"enum": ["AtStartup", "WaitForWorkersReady"]},
        sshAuthMountPath=STRING,
        runPolicy=fields(
            cleanPodPolicy={"enum": ["None", "Running", "All"]}, backoffLimit={"type": "integer"}
        ),
        mpiReplicaSpecs=fields(Launcher=REPLICAS, Worker=REPLICAS),
    ),
    "apps/v1 Deployment": fields(
        replicas=COUNT,
        strategy=fields(type={"enum": ["Recreate", "RollingUpdate"]}),
        selector=fields(matchLabels=LABELS),
        template=TEMPLATE,
    ),
    "v1 Service": fields(
        selector=LABELS, ports=listed(fields(name=STRING, port=COUNT, targetPort=PORT))
    ),
    "v1 PersistentVolumeClaim": fields(
        accessModes={"type": "array", "items": {"enum": ["ReadWriteMany"]}},
        resources=fields(requests=AMOUNTS),
    ),
}
"""By version and kind: the fields of `spec` that manifests use, as the interface has them."""


def documents() -> list[dict[str, Any]]:
    texts = (file.read_text() for file in sorted(FOLDER.glob("*.yaml")))
    return [document for text in texts for document in yaml.safe_load_all(text)]


def of_kind(kind: str) -> dict[str, Any]:
    (document,) = (document for document in documents() if document["kind"] == kind)
    return document


def pods() -> Iterator[dict[str, Any]]:
    """What pods of manifests have as their `spec`."""
    replicas = of_kind("MPIJob")["spec"]["mpiReplicaSpecs"].values()
    for owner in (*replicas, of_kind("Deployment")["spec"]):
        yield owner["template"]["spec"]


def test_manifests_have_the_fields_of_their_kinds() -> None:
    for document in documents():
        kind = f"{document['apiVersion']} {document['kind']}"
        schema = fields(apiVersion=STRING, kind=STRING, metadata=METADATA, spec=SPECS[kind])
        jsonschema.validate(document, schema)


def test_a_field_that_is_not_of_its_kind_is_noticed() -> None:
    job = of_kind("MPIJob")["spec"]
    for path in (["slotPerWorker"], ["mpiReplicaSpecs", "Worker", "restart"]):
        holder = job
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = 1
        with pytest.raises(jsonschema.ValidationError, match=r"(was|were) unexpected"):
            jsonschema.validate(job, SPECS["kubeflow.org/v2beta1 MPIJob"])
        del holder[path[-1]]


def test_what_manifests_refer_to_is_there() -> None:
    claims = {d["metadata"]["name"] for d in documents() if d["kind"] == "PersistentVolumeClaim"}
    for pod in pods():
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        used = {
            volume["persistentVolumeClaim"]["claimName"]
            for volume in volumes.values()
            if "persistentVolumeClaim" in volume
        }
        assert used <= claims
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
            named = {port["name"] for port in container.get("ports", ())}
            for probe in (value for key, value in container.items() if key.endswith("Probe")):
                assert (probe.get("httpGet") or probe["tcpSocket"])["port"] in named
    selector = of_kind("Service")["spec"]["selector"]
    deployment = of_kind("Deployment")["spec"]
    assert selector == deployment["selector"]["matchLabels"]
    assert selector == deployment["template"]["metadata"]["labels"]


def test_pods_fit_the_image() -> None:
    (tag,) = re.findall(r"-t (\S+) \.", IMAGE)
    (uid,) = map(int, re.findall(r"--uid (\d+) cg", IMAGE))
    (workdir,) = re.findall(r"WORKDIR (\S+)", IMAGE)
    containers = [container for pod in pods() for container in pod["containers"]]
    for container in containers:
        assert (container["image"], container["workingDir"]) == (tag, workdir)
        assert container["securityContext"]["runAsUser"] == uid
        for variable in container.get("env", ()):
            known = {entry.name for entry in VARIABLES}
            assert not variable["name"].startswith("CG_") or variable["name"] in known
    worker = of_kind("MPIJob")["spec"]["mpiReplicaSpecs"]["Worker"]["template"]["spec"]
    (sshd,) = worker["containers"]
    assert f"> {sshd['command'][-1]}" in IMAGE
    ports = set(map(int, re.findall(r"'Port (\d+)'", IMAGE)))
    assert ports == {sshd["ports"][0]["containerPort"]}
    assert f"'HostKey {of_kind('MPIJob')['spec']['sshAuthMountPath']}/id_rsa'" in IMAGE
    extras = re.findall(r"'\.\[(.*)\]'", IMAGE)[0].split(",")
    setup = (ROOT / "setup.cfg").read_text()
    assert all(f"\n{extra} =\n" in setup for extra in extras)


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_the_launcher_starts_all_ranks_and_goes_on(has_checkpoint: bool, tmp_path: Path) -> None:
    job = of_kind("MPIJob")["spec"]
    (container,) = job["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    if has_checkpoint:
        (tmp_path / "runs/train/checkpoints").mkdir(parents=True)
        (tmp_path / "runs/train/checkpoints/latest").touch()
    workers, slots = job["mpiReplicaSpecs"]["Worker"]["replicas"], job["slotsPerWorker"]
    hosts = [f"train-worker-{number}.train.default.svc:{slots}" for number in range(workers)]
    (tmp_path / "hostfile").write_text("".join(f"{host}\n" for host in hosts))
    (tmp_path / "bin").mkdir()
    for name, line in {"python": 'echo "$@"', "getent": 'echo "asked $2" >&2'}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    script, *rest = container["args"]
    script = script.replace("/etc/mpi/hostfile", str(tmp_path / "hostfile"))
    script = script.replace("/runs/", f"{tmp_path}/runs/")
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    command = [*container["command"], script, *rest]
    options = {"env": {"PATH": path}, "capture_output": True, "text": True, "timeout": 60}
    done = subprocess.run(command, check=True, **options)
    assert done.stderr == "".join(f"asked {host.split(':')[0]}\n" for host in hosts)
    words = done.stdout.split()
    assert words[:4] == ["-m", "cg.launch", "-n", str(workers * slots)]
    assert ("--resume" in words) == has_checkpoint
    assert words[words.index("--out") + 1] == f"{tmp_path}/runs/train"


def test_the_server_knows_its_options_and_its_probes() -> None:
    pod = of_kind("Deployment")["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = serving._parse(container["args"])
    assert options.port == container["ports"][0]["containerPort"]
    assert options.drain < pod["terminationGracePeriodSeconds"]
    (key,) = (entry["name"] for entry in container["env"] if "valueFrom" in entry)
    assert options.api_key == f"$({key})"
    served = (ROOT / "examples/serve/front/server.py").read_text()
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert f'web.get("{container[probe]["httpGet"]["path"]}"' in served
