// What the pages do beside links and forms; without it they work as well.
(() => {
  "use strict";
  const live = () => document.getElementById("live");
  const pause = document.getElementById("pause");
  const asOf = document.getElementById("as-of");
  let isPaused = false;

  const isBusy = () => {
    const selection = document.getSelection();
    const inside = selection && !selection.isCollapsed && live()?.contains(selection.anchorNode);
    return isPaused || document.hidden || Boolean(inside);
  };

  // A person who reads, copies or looks elsewhere is not to be disturbed.
  document.addEventListener("htmx:before:request", (event) => {
    if (isBusy()) event.preventDefault();
  });
  document.addEventListener("htmx:after:request", (event) => {
    const response = event.detail?.ctx?.response;
    document.body.classList.toggle("stale", !(response && response.status < 400));
  });
  document.addEventListener("htmx:error", () => document.body.classList.add("stale"));
  document.addEventListener("htmx:after:swap", () => {
    if (asOf && live()) asOf.textContent = `as of ${live().dataset.asOf}`;
  });

  if (pause) {
    pause.hidden = false;
    pause.addEventListener("click", () => {
      isPaused = !isPaused;
      pause.setAttribute("aria-pressed", String(isPaused));
      pause.textContent = isPaused ? "Go on" : "Pause";
      document.body.classList.toggle("paused", isPaused);
    });
  }

  // What was done is told once: not again when the page is loaded anew, or its address is passed on.
  const here = new URL(location.href);
  if (here.searchParams.has("act")) {
    here.searchParams.delete("act");
    history.replaceState(null, "", here);
  }

  // A part of something long is done: go on with the next one.
  document.querySelector("#goes-on form")?.submit();

  // The local time of a moment, beside that of the database.
  document.addEventListener("pointerover", (event) => {
    const time = event.target.closest?.("time");
    if (time && !time.dataset.local) {
      time.dataset.local = "yes";
      time.title += ` (${new Date(time.dateTime).toLocaleString()} here)`;
    }
  });

  const places = { o: "/", s: "/streams", t: "/triggers", d: "/dags", r: "/runs", l: "/dead-letters" };
  let goes = false;
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.matches("input, select, textarea")) return;
    if (goes && places[event.key]) {
      location.assign(places[event.key]);
    } else if (event.key === "p" && pause) {
      pause.click();
    } else if (event.key === "/" && document.getElementById("search")) {
      event.preventDefault();
      document.getElementById("search").focus();
    } else if (event.key === "?") {
      location.assign("/help");
    }
    goes = event.key === "g";
  });
})();
