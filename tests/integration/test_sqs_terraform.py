"""Terraform and the AWS provider against a worker: queues are made, changed, imported and destroyed.

Needs `terraform`, and the provider's binary in `MARQ_TEST_TERRAFORM_PROVIDER`; without them `test_sqs_words.py` has the
provider's calls.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cluster import Cluster
from tests.integration.sqs_client import Queue, client_of, refused
from tests.kafka import unique

PROVIDER = os.environ.get("MARQ_TEST_TERRAFORM_PROVIDER", "")
CONFIG = """
terraform {
  required_providers {
    aws = { source = "hashicorp/aws" }
  }
}

provider "aws" {
  region                  = "eu-central-1"
  access_key              = "x"
  secret_key              = "x"
  max_retries             = 1
  skip_metadata_api_check = true
  endpoints {
    ec2 = "URL"  # versions before 5 look there, and go on without
    iam = "URL"
    sqs = "URL"
    sts = "URL"
  }
}

variable "visibility" { type = number }

resource "aws_sqs_queue" "dead" {
  name = "NAME-dead"
}

resource "aws_sqs_queue" "jobs" {
  name                       = "NAME"
  visibility_timeout_seconds = var.visibility
  redrive_policy = jsonencode({
    deadLetterTargetArn = aws_sqs_queue.dead.arn
    maxReceiveCount     = 4
  })
  tags = { stage = "test" }
}

resource "aws_sqs_queue" "orders" {
  name                        = "NAME.fifo"
  fifo_queue                  = true
  content_based_deduplication = true
}

resource "aws_sqs_queue_policy" "jobs" {
  queue_url = aws_sqs_queue.jobs.id
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid = "all", Effect = "Allow", Principal = "*", Action = "sqs:SendMessage", Resource = aws_sqs_queue.jobs.arn
    }]
  })
}

data "aws_caller_identity" "me" {}

output "account" { value = data.aws_caller_identity.me.account_id }
"""


class Terraform:
    """In a folder of its own, with the provider that is here."""

    def __init__(self, folder: Path, url: str, name: str) -> None:
        self._folder = folder
        (folder / "main.tf").write_text(CONFIG.replace("URL", url).replace("NAME", name))
        plugins = str(Path(PROVIDER).resolve().parent)
        inner = f'  dev_overrides {{\n    "hashicorp/aws" = "{plugins}"\n  }}\n  direct {{}}\n'
        (folder / "rc").write_text("provider_installation {\n" + inner + "}\n")

    def run(self, *arguments: str) -> str:
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "TF_"))}
        given = {"TF_CLI_CONFIG_FILE": str(self._folder / "rc"), "CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1"}
        done = subprocess.run(
            ["terraform", *arguments], cwd=self._folder, env=kept | given, capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def apply(self, visibility: int, *more: str) -> str:
        return self.run("apply", "-auto-approve", "-no-color", f"-var=visibility={visibility}", *more)


@pytest.mark.slow
@pytest.mark.skipif(
    shutil.which("terraform") is None or not PROVIDER, reason="terraform or MARQ_TEST_TERRAFORM_PROVIDER is missing"
)
def test_terraform_makes_changes_imports_and_destroys_queues(shared_cluster: Cluster, tmp_path: Path) -> None:
    url, name = shared_cluster.workers[0].url, unique("tf")
    sqs: Any = client_of(url)
    terraform = Terraform(tmp_path, url, name)

    assert "4 added, 0 changed, 0 destroyed" in terraform.apply(45)
    assert terraform.run("output", "-raw", "account") == "0" * 12
    jobs = Queue(sqs, sqs.get_queue_url(QueueName=name)["QueueUrl"])
    assert jobs.attribute("VisibilityTimeout") == "45"
    assert json.loads(jobs.attribute("RedrivePolicy"))["maxReceiveCount"] == 4
    assert json.loads(jobs.attribute("Policy"))["Statement"][0]["Sid"] == "all"
    assert sqs.list_queue_tags(QueueUrl=jobs.url)["Tags"] == {"stage": "test"}
    # it gets the values that it has set: there is nothing to do
    assert "No changes" in terraform.run("plan", "-no-color", "-var=visibility=45", "-detailed-exitcode")

    assert "0 added, 1 changed, 0 destroyed" in terraform.apply(60)
    assert jobs.attribute("VisibilityTimeout") == "60"

    terraform.run("state", "rm", "aws_sqs_queue.orders")
    fifo = sqs.get_queue_url(QueueName=f"{name}.fifo")["QueueUrl"]
    terraform.run("import", "-no-color", "-var=visibility=60", "aws_sqs_queue.orders", fifo)
    assert "No changes" in terraform.run("plan", "-no-color", "-var=visibility=60", "-detailed-exitcode")

    assert "4 destroyed" in terraform.run("destroy", "-auto-approve", "-no-color", "-var=visibility=60")
    with refused("AWS.SimpleQueueService.NonExistentQueue", "QueueDoesNotExist"):
        jobs.attributes()
