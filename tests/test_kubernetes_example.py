"""examples/kubernetes.yaml: by the schema of Kubernetes, offline, and by what pd-train makes of its names."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import pytest

from pd_format.hosts import place_workers, read_hosts
from pd_train.whoami import find_identity
from plans import HERE
from test_checkpoint import options_of

pytestmark = pytest.mark.launchers

MANIFEST = HERE.parent / "examples" / "kubernetes.yaml"


@pytest.fixture(scope="module")
def documents() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="pip install '.[clusters]' brings it")
    return list(yaml.safe_load_all(MANIFEST.read_text()))


def test_every_object_keeps_to_the_schema(documents: list[dict[str, Any]]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of the checker itself.
        kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install '.[clusters]' brings it")
        for document in documents:
            kubernetes_validate.validate(document, "1.31", strict=True)
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate({**documents[0], "spec": {"clusterIp": "None"}}, "1.31", strict=True)


def test_its_names_are_those_that_the_pods_get(documents: list[dict[str, Any]], tmp_path: Path) -> None:
    service, policy, job = documents
    assert [each["kind"] for each in documents] == ["Service", "NetworkPolicy", "Job"]
    name, template = job["metadata"]["name"], job["spec"]["template"]["spec"]
    assert template["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == policy["spec"]["podSelector"]["matchLabels"] == {"job-name": name}
    found = re.search(r'--hosts "([^"]+)"', template["containers"][0]["args"][0])
    assert found is not None
    hosts = found[1].replace("$NAMESPACE", "default")
    workers = job["spec"]["completions"]
    plan = options_of(tmp_path, "2-1-1").plan
    own = f"{name}-2.{service['metadata']['name']}.default.svc.cluster.local"
    assert place_workers(read_hosts(hosts), workers)[2].address == own
    port = template["containers"][0]["ports"][0]["containerPort"]
    assert port == service["spec"]["ports"][0]["port"] == place_workers(read_hosts(hosts), workers)[2].port
    identity = find_identity(plan, None, hosts, {"JOB_COMPLETION_INDEX": "2"}, lambda address: address == own)
    assert identity.ranks == (2,)
    key = next(volume for volume in template["volumes"] if volume["name"] == "key")
    assert key["secret"]["defaultMode"] == 0o400
