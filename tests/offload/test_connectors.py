"""The library's connectors."""

import pytest

from jaxkv.offload import BlockServer, DiskPool, HostPool, JaxTransport, NixlTransport, RemoteBlocks
from offload.connector_suite import ConnectorSuite


class TestHostPool(ConnectorSuite):
    def connectors(self, layout, folder):
        pool = HostPool(layout, 64)
        return pool, pool


class FromDisk(HostPool):
    """A pool with a disk pool whose blocks are always on disk only."""

    def __contains__(self, key):
        self.flush()
        for chunk in list(self._chunks):
            self._chunks.remove(chunk)
        return super().__contains__(key)


class TestDiskPool(ConnectorSuite):
    def connectors(self, layout, folder):
        pool = FromDisk(layout, 64, disk=DiskPool(folder, layout, model="toy"))
        return pool, pool


class TestRemoteBlocks(ConnectorSuite):
    transport = JaxTransport

    def connectors(self, layout, folder):
        pool = HostPool(layout, 64)
        server = BlockServer(pool, ("127.0.0.1", 0), authkey=b"password", transport=self.transport())
        blocks = RemoteBlocks(layout, [server.address], authkey=b"password", transport=self.transport())
        self.opened += [blocks, server]
        return pool, blocks


class TestNixl(TestRemoteBlocks):
    @staticmethod
    def transport():
        try:
            return NixlTransport()
        except ImportError as error:
            pytest.skip(str(error))
