"""Mooncake's TransferEngine over TCP. batch_transfer_sync_write returns when the target has acknowledged all of it (framing
with acknowledgements, since 0.3.12). It carries no notification, so the initiator then tells the target with one message
on a socket of theirs, as the engines that use Mooncake do."""
import importlib.metadata


def version():
    return f"mooncake-transfer-engine-non-cuda {importlib.metadata.version('mooncake-transfer-engine-non-cuda')}"


class Mooncake:
    def __init__(self, _role, pool, options):
        from mooncake.engine import TransferEngine
        self.engine = TransferEngine()
        if self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
            raise RuntimeError("TransferEngine.initialize failed")
        if self.engine.register_memory(pool.address, pool.size) != 0:
            raise RuntimeError("TransferEngine.register_memory failed")
        self.pool = pool
        self.batch = options.get("batch", 0)

    def hello(self):
        return {"name": f"127.0.0.1:{self.engine.get_rpc_port()}", "address": self.pool.address}

    def connect(self, hello):
        self.name = hello["name"]
        self.remote_address = hello["address"]

    def prepare(self, parts, _tag):
        dst_at, src_at, lengths = (part.tolist() for part in parts)
        dst_at = [self.remote_address + at for at in dst_at]
        src_at = [self.pool.address + at for at in src_at]
        step = self.batch or len(dst_at)
        return [(src_at[i:i + step], dst_at[i:i + step], lengths[i:i + step]) for i in range(0, len(dst_at), step)]

    def write(self, batches, tag, tell):
        for src_at, dst_at, lengths in batches:
            status = self.engine.batch_transfer_sync_write(self.name, src_at, dst_at, lengths)
            if status != 0:
                raise RuntimeError(f"batch_transfer_sync_write returned {status}")
        tell(tag)

    def release(self, _batches):
        pass

    def wait(self, tag, told):
        if told() != tag:
            raise RuntimeError("another tag was told")
