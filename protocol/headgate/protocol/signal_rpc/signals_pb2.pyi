from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Run(_message.Message):
    __slots__ = ("dag", "run_id")
    DAG_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    dag: str
    run_id: str
    def __init__(self, dag: _Optional[str] = ..., run_id: _Optional[str] = ...) -> None: ...

class NewSignal(_message.Message):
    __slots__ = ("key", "namespace", "value", "dedup", "run")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    DEDUP_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    key: str
    namespace: str
    value: bytes
    dedup: str
    run: Run
    def __init__(self, key: _Optional[str] = ..., namespace: _Optional[str] = ..., value: _Optional[bytes] = ..., dedup: _Optional[str] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class SendRequest(_message.Message):
    __slots__ = ("signals", "sender")
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    signals: _containers.RepeatedCompositeFieldContainer[NewSignal]
    sender: str
    def __init__(self, signals: _Optional[_Iterable[_Union[NewSignal, _Mapping]]] = ..., sender: _Optional[str] = ...) -> None: ...

class SentSignal(_message.Message):
    __slots__ = ("version", "is_new")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    IS_NEW_FIELD_NUMBER: _ClassVar[int]
    version: int
    is_new: bool
    def __init__(self, version: _Optional[int] = ..., is_new: _Optional[bool] = ...) -> None: ...

class SendResponse(_message.Message):
    __slots__ = ("sent",)
    SENT_FIELD_NUMBER: _ClassVar[int]
    sent: _containers.RepeatedCompositeFieldContainer[SentSignal]
    def __init__(self, sent: _Optional[_Iterable[_Union[SentSignal, _Mapping]]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("key", "namespace", "version", "after", "limit")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    key: str
    namespace: str
    version: int
    after: int
    limit: int
    def __init__(self, key: _Optional[str] = ..., namespace: _Optional[str] = ..., version: _Optional[int] = ..., after: _Optional[int] = ..., limit: _Optional[int] = ...) -> None: ...

class Signal(_message.Message):
    __slots__ = ("version", "value", "sender", "sent_at_s", "dedup", "run")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SENDER_FIELD_NUMBER: _ClassVar[int]
    SENT_AT_S_FIELD_NUMBER: _ClassVar[int]
    DEDUP_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    version: int
    value: bytes
    sender: str
    sent_at_s: float
    dedup: str
    run: Run
    def __init__(self, version: _Optional[int] = ..., value: _Optional[bytes] = ..., sender: _Optional[str] = ..., sent_at_s: _Optional[float] = ..., dedup: _Optional[str] = ..., run: _Optional[_Union[Run, _Mapping]] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("signals",)
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    signals: _containers.RepeatedCompositeFieldContainer[Signal]
    def __init__(self, signals: _Optional[_Iterable[_Union[Signal, _Mapping]]] = ...) -> None: ...

class ListenRequest(_message.Message):
    __slots__ = ("key", "namespace", "after")
    KEY_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    key: str
    namespace: str
    after: int
    def __init__(self, key: _Optional[str] = ..., namespace: _Optional[str] = ..., after: _Optional[int] = ...) -> None: ...

class ListenResponse(_message.Message):
    __slots__ = ("signals", "seen")
    SIGNALS_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    signals: _containers.RepeatedCompositeFieldContainer[Signal]
    seen: int
    def __init__(self, signals: _Optional[_Iterable[_Union[Signal, _Mapping]]] = ..., seen: _Optional[int] = ...) -> None: ...
