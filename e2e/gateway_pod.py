"""Runs in a pod of the image under test, in a gateway's place: asks the picker once, and prints the endpoints."""

from __future__ import annotations

import json
import ssl
import sys
from typing import Final

import grpc

from diptych.v1.ext_proc_pb2 import HeaderMap, HeaderValue, HttpHeaders, ProcessingRequest, ProcessingResponse

PROCESS: Final = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
DESTINATION: Final = "x-gateway-destination-endpoint"


def main() -> None:
    target, session = sys.argv[1:]
    headers = [HeaderValue(key=":path", raw_value=b"/v1/completions")]
    if session:
        headers.append(HeaderValue(key="x-diptych-session", raw_value=session.encode()))
    request = ProcessingRequest(request_headers=HttpHeaders(headers=HeaderMap(headers=headers)))
    host, _, port = target.rpartition(":")
    shown = ssl.get_server_certificate((host, int(port)), timeout=20)  # made by the picker: gateways believe it, too
    named = [("grpc.ssl_target_name_override", "diptych-picker")]
    with grpc.secure_channel(target, grpc.ssl_channel_credentials(shown.encode()), named) as channel:
        call = channel.stream_stream(
            PROCESS,
            request_serializer=ProcessingRequest.SerializeToString,
            response_deserializer=ProcessingResponse.FromString,
        )
        [answer] = call(iter([request]), timeout=20, wait_for_ready=True)
    print(json.dumps(answer.dynamic_metadata["envoy.lb"][DESTINATION].split(",")))


if __name__ == "__main__":
    main()
