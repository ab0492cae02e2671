"""Peers from DNS and from etcd: `peer_source` reads the instances that exist now, `PeerFollower` configures them at a manager
as they come and go, and `Announcement` enters an instance into etcd for as long as it lives.
"""

from disagg.discovery.etcd import Announcement
from disagg.discovery.follower import PeerFollower
from disagg.discovery.parse import announced_at, check_source, peer_source
from disagg.discovery.source import Found, PeerSource

__all__ = ["Announcement", "Found", "PeerFollower", "PeerSource", "announced_at", "check_source", "peer_source"]
