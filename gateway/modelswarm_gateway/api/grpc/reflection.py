"""Server reflection under both of its names: `grpc.reflection.v1`, and `v1alpha` for older clients.

Added to the server by `server.py`. grpcio-reflection has only v1alpha. The messages of both are the same, so one
servicer answers for both; only the descriptor of v1 is made here.
"""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc import aio
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

V1_SERVICE = "grpc.reflection.v1.ServerReflection"
METHOD = "ServerReflectionInfo"


def add_reflection(services: Sequence[str], server: aio.Server) -> None:
    """Let clients ask the server for the descriptors of `services` and of both reflection services."""
    _add_v1_descriptor()
    names = (*services, V1_SERVICE, reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)  # type: ignore[attr-defined]
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        reflection_pb2.ServerReflectionRequest.FromString,
        reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(V1_SERVICE, {METHOD: handler}),)
    )


def _add_v1_descriptor() -> None:
    """Add the file of v1 to the descriptors that reflection serves; adding it again has no effect."""
    alpha, made = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(alpha)
    text_format.Parse(text_format.MessageToString(alpha).replace("v1alpha", "v1"), made)
    descriptor_pool.Default().AddSerializedFile(made.SerializeToString())
