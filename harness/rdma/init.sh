#!/bin/busybox sh
# The guest's first process. Mounts the host's files read-only, with the unpacked packages and a layer in memory above them,
# and runs there what the host left in the shared folder, which `shared=` names in the kernel's options.
/bin/busybox mkdir -p /proc /sys /dev /host /packages /top /system
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do insmod "$module"; done
for option in $(cat /proc/cmdline); do
  case $option in shared=*) export "$option" ;; esac
done

files=trans=virtio,version=9p2000.L,msize=524288
mount -t 9p -o "$files,ro,cache=loose" host /host
mount -t 9p -o "$files,ro,cache=loose" packages /packages
mount -t tmpfs tmpfs /top
mkdir /top/upper /top/work
mount -t overlay -o "lowerdir=/packages:/host,upperdir=/top/upper,workdir=/top/work" overlay /system
mount -t 9p -o "$files" shared "/system$shared"
for folder in proc sys dev; do mount --bind /$folder /system/$folder; done
for folder in dev/shm run; do
  mkdir -p /system/$folder
  mount -t tmpfs -o mode=1777 tmpfs /system/$folder
done
mkdir -p /dev/pts
mount -t devpts devpts /system/dev/pts
ip link set lo up
ulimit -l unlimited

touch "/system$shared/booted"
chroot /system /bin/bash "$shared/run.sh"
echo $? >"/system$shared/status"
poweroff -f
