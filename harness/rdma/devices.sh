# Sourced in the guest: RDMA devices `rxe0` to `rxe2` over network devices `d0` to `d2` that lead nowhere else, so they do not
# reach each other. Their GID at index 1 is the IPv4 address. `rxe2` is down.
for number in 0 1 2; do
  ip link add "d$number" type dummy
  ip link set "d$number" mtu 9000 up
  ip addr add "10.99.$number.1/24" dev "d$number"
  rdma link add "rxe$number" type rxe netdev "d$number"
done
ip link set d2 down

# NIXL's wheel has a libibverbs of its own with the provider of mlx5 alone: put the system's in its place.
for bundled in .venv/lib/python*/site-packages/nixl_cu*.libs/libibverbs-*; do
  mount --bind "/usr/lib/$(uname -m)-linux-gnu/libibverbs.so.1" "$bundled"
done
export UCX_IB_GID_INDEX=1 MC_GID_INDEX=1

# Routes to this host's own addresses come after the rules of `link.py`, not first.
ip rule add pref 200 lookup local
ip rule delete pref 0
