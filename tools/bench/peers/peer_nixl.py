"""NIXL: one agent each, DRAM, UCX backend. Applied and notified: the state is DONE at the initiator and the notification,
which UCX sends after the flush, was seen by the target."""
import ctypes
import glob
import importlib.metadata
import os

import numpy as np


def version():
    import nixl_cu12
    place = os.path.join(os.path.dirname(os.path.dirname(nixl_cu12.__file__)), "nixl_cu12.libs", "libucp-*")
    ucx = "unknown"
    for path in glob.glob(place):
        parts = [ctypes.c_uint() for _ in range(3)]
        ctypes.CDLL(path).ucp_get_version(*map(ctypes.byref, parts))
        ucx = ".".join(str(part.value) for part in parts)
    return f"nixl-cu12 {importlib.metadata.version('nixl-cu12')}, its own UCX {ucx}"


class Nixl:
    def __init__(self, role, pool, options):
        from nixl_cu12._api import nixl_agent, nixl_agent_config
        backend = options.get("backend", {})
        config = nixl_agent_config(enable_prog_thread=options.get("progress_thread", False), backends=[])
        self.agent = nixl_agent(role, config)
        self.agent.create_backend("UCX", {**self.agent.get_plugin_params("UCX"), **backend})
        self.pool = pool
        self.registered = self.agent.register_memory([(pool.address, pool.size, 0, "")], mem_type="DRAM")
        self.seen = set()

    def hello(self):
        return {"metadata": self.agent.get_agent_metadata(), "address": self.pool.address}

    def connect(self, hello):
        self.remote = self.agent.add_remote_agent(hello["metadata"])
        self.remote_address = hello["address"]

    def _descriptors(self, base, offsets, lengths):
        table = np.zeros((len(offsets), 3), dtype=np.uint64)
        table[:, 0] = offsets + np.uint64(base)
        table[:, 1] = lengths
        return self.agent.get_xfer_descs(table, "DRAM")

    def prepare(self, parts, tag):
        dst_at, src_at, lengths = parts
        return self.agent.initialize_xfer("WRITE", self._descriptors(self.pool.address, src_at, lengths),
                                          self._descriptors(self.remote_address, dst_at, lengths), self.remote, tag)

    def write(self, handle, _tag, _tell):
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"NIXL transfer ended as {state}")

    def release(self, handle):
        handle.release()

    def wait(self, tag, _told):
        while tag not in self.seen:
            for tags in self.agent.get_new_notifs().values():
                self.seen.update(tags)
        self.seen.discard(tag)
