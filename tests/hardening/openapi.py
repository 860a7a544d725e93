"""Requests as the server's own OpenAPI document allows them, and such as it does not, drawn by schemathesis.

    PYTHONPATH=tests python -m hardening.openapi --cases 5000

Every answer must have a status, content type and body that the document names, and never 500.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import schemathesis
from conftest import tiny_folder
from hypothesis import HealthCheck, Phase, given, settings
from servers import running

import odevit_serve
from odevit_serve.serving.engine import Engine
from odevit_serve.serving.http.middleware import Options


def conform(address: str, examples: int) -> Counter[str]:
    """Ask every operation so often, rightly and wrongly; raises at an answer that the document does not allow."""
    schema = schemathesis.openapi.from_url(f"{address}/openapi.json")
    known = schemathesis.checks
    checks = [known.status_code_conformance, known.content_type_conformance, known.response_schema_conformance]
    asked: Counter[str] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
            if mode == schemathesis.GenerationMode.NEGATIVE and operation.method != "post":
                continue  # no part of it can be wrong

            @given(case=operation.as_strategy(generation_mode=mode))
            @settings(
                max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None,
                phases=[Phase.generate], derandomize=True,
            )  # fmt: skip
            def ask(case: Any) -> None:
                response = case.call()
                assert response.status_code != 500  # 504 is a fair answer to a deadline of a nanosecond
                case.validate_response(response, checks=checks)
                asked[name] += 1  # noqa: B023 - it is called within the round

            name = f"{operation.method.upper()} {operation.path} {mode.value}"
            ask()
    return asked


def main() -> int:
    reader = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    reader.add_argument("--cases", type=int, default=5000, help="at least so many")
    asked = reader.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = Engine(odevit_serve.load(tiny_folder(Path(folder)), threads=1), slots=8, queue=64)
        with running(engine, Options(max_body=2**20)) as address:
            total: Counter[str] = Counter()
            examples = max(2, asked.cases // 20)
            while total.total() < asked.cases:  # operations without parameters have one case only
                total = conform(address, examples)
                examples *= 2
    print(json.dumps({"cases": total.total(), "by_operation": total}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
