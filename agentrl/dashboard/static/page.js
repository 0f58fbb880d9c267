// Every page: times in the reader's zone, sign-in by a link's fragment, and live updates of the parts named `live-…`.
const LIVE = "[id^='live-']";

export function localTimes(root = document) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    const at = new Date(time.dateTime);
    time.textContent = at.toLocaleString(undefined, { dateStyle: "medium", timeStyle: "medium" });
    time.title = time.dateTime;
  }
}

// A link such as /ui/sign-in#KEY signs in: a fragment stays in the browser until the form sends it.
function signInByFragment() {
  const form = document.getElementById("sign-in");
  if (!form || location.hash.length < 2) return;
  form.elements.key.value = decodeURIComponent(location.hash.slice(1));
  history.replaceState(null, "", location.pathname + location.search);
  form.submit();
}

// Replaces the live parts by those of the page as it is now. What has the focus stays. A page that the server shares
// may lack the change: it is read once more when the server makes it anew.
let again;
async function refresh() {
  clearTimeout(again);
  const answer = await fetch(location.href, { headers: { accept: "text/html" } });
  if (answer.redirected || answer.status === 401) return location.reload();
  if (!answer.ok) return say(`The page could not be read again: ${answer.status}`);
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll(LIVE)) {
    const now = fresh.getElementById(part.id);
    if (!now || part.innerHTML === now.innerHTML || part.contains(document.activeElement)) continue;
    part.replaceChildren(...now.childNodes);
    part.className = now.className;
    localTimes(part);
  }
  const anew = answer.headers.get("agentrl-anew-in");
  if (anew !== null) again = setTimeout(refresh, 1000 * Number(anew) + 100);
  say("");
  document.dispatchEvent(new Event("refreshed"));
}

function say(text) {
  document.getElementById("said").textContent = text;
}

function live() {
  const address = document.querySelector("[data-live]")?.dataset.live;
  if (!address || !document.querySelector(`${LIVE}, [data-series]`)) return;
  let source = null, stale = false;
  const open = () => {
    source = new EventSource(address);
    source.addEventListener("changed", () => (document.hidden ? (stale = true) : refresh()));
    source.onerror = () => say("The connection to the run is lost; trying again.");
    source.onopen = () => say("");
  };
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden && stale) { stale = false; refresh(); }
  });
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) open(); });
  open();
}

for (const button of document.querySelectorAll("[data-copy]"))
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copy).textContent);
    say("Copied.");
  });
localTimes();
signInByFragment();
live();
