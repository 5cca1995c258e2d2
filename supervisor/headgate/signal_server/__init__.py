"""``headgate signals serve``: signals for programs elsewhere, over gRPC. It runs no users' code.

`StoreThread` has the database; the threads of gRPC, one for each call, have it send and read for them. A listener waits
in its thread, and that one thread is woken by whoever commits, for all listeners together.
"""
