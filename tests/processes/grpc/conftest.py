"""One swarm of two servers and a gateway for all tests of the gRPC API that kill nothing."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from support.processes.swarm import ENDLESS, Endpoints, HashSwarm, two_spans

from modelswarm.protocol.wire import api_pb2_grpc


@pytest.fixture(scope="package")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HashSwarm]:
    with two_spans(tmp_path_factory.mktemp("grpc"), context=ENDLESS) as made:
        yield made


@pytest.fixture(scope="package")
def endpoints(swarm: HashSwarm) -> Endpoints:
    return swarm.gateway()


@pytest.fixture
def stub(endpoints: Endpoints) -> Iterator[api_pb2_grpc.InferenceStub]:
    with grpc.insecure_channel(endpoints.grpc) as channel:
        yield api_pb2_grpc.InferenceStub(channel)
